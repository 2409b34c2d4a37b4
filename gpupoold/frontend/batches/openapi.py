"""The OpenAPI description of files and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from gpupool_state.batches import BatchStatus
from gpupoold.frontend.batches.files import ENDPOINTS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "integer"}
_MAYBE_NUMBER: Schema = {"type": ["integer", "null"]}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_EXPIRY: Schema = {
    "type": "object",
    "required": ["anchor", "seconds"],
    "properties": {
        "anchor": {"const": "created_at"},
        "seconds": _NUMBER | {"minimum": 3600, "maximum": 2_592_000},
    },
}
_ENDED_AT = ("completed_at", "failed_at", "expired_at", "cancelled_at")
SCHEMAS: dict[str, Schema] = {
    "PoolFile": {
        "type": "object",
        "properties": {
            "id": _TEXT,
            "object": {"const": "file"},
            "bytes": _NUMBER,
            "created_at": _NUMBER,
            "filename": _TEXT,
            "purpose": {"enum": ["batch", "batch_output", "batch_error"]},
            "status": {"const": "processed"},
            "expires_at": _NUMBER,
        },
    },
    "PoolBatch": {
        "type": "object",
        "properties": {
            "id": _TEXT,
            "object": {"const": "batch"},
            "endpoint": {"enum": sorted(ENDPOINTS)},
            "errors": {"type": ["object", "null"]},
            "input_file_id": _TEXT,
            "completion_window": _TEXT,
            "status": {"enum": list(get_args(BatchStatus))},
            "output_file_id": _MAYBE_TEXT,
            "error_file_id": _MAYBE_TEXT,
            "created_at": _NUMBER,
            "in_progress_at": _MAYBE_NUMBER,
            "expires_at": _NUMBER,
            "finalizing_at": _MAYBE_NUMBER,
            "cancelling_at": _MAYBE_NUMBER,
            **dict.fromkeys(_ENDED_AT, _MAYBE_NUMBER),
            "request_counts": {
                "type": "object",
                "properties": dict.fromkeys(("total", "completed", "failed"), _NUMBER),
            },
            "metadata": {"type": ["object", "null"]},
            "status_details": {
                "type": ["object", "null"],
                "description": "Why requests wait for another try.",
                "properties": {"reason": _TEXT, "next_try_at": _MAYBE_NUMBER},
            },
        },
    },
    "NewPoolBatch": {
        "type": "object",
        "required": ["input_file_id", "endpoint"],
        "properties": {
            "input_file_id": _TEXT,
            "endpoint": {"enum": sorted(ENDPOINTS)},
            "completion_window": _TEXT | {"default": "24h"},
            "metadata": {
                "type": ["object", "null"],
                "maxProperties": 16,
                "additionalProperties": _TEXT | {"maxLength": 512},
            },
            "output_expires_after": _EXPIRY,
        },
    },
}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_REFUSALS = {
    400: "The request is wrong.",
    404: "There is none, or it belongs to another key.",
    408: "The file arrives too slowly.",
    409: "The status does not allow this.",
    413: "The file is too large.",
    429: "A bound of space or number is reached.",
    503: "The disk fails, or the server is starting.",
}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _operation(
    summary: str,
    answer: str,
    content: Schema,
    refusals: Sequence[int],
    parameters: Sequence[Schema] = (),
    body: Schema | None = None,
) -> Schema:
    """Return an operation; ``refusals`` are the statuses of its errors beside 503."""
    responses: Schema = {"200": {"description": answer, "content": content}}
    for status in (*refusals, 503):
        responses[str(status)] = {"description": _REFUSALS[status], "content": _json({})}
    described: Schema = {"summary": summary, "responses": responses}
    if parameters:
        described["parameters"] = list(parameters)
    if body is not None:
        described["requestBody"] = {"required": True, "content": body}
    return described


def _list_of(name: str) -> Schema:
    return {
        "type": "object",
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": _ref(name)},
            "first_id": _MAYBE_TEXT,
            "last_id": _MAYBE_TEXT,
            "has_more": {"type": "boolean"},
        },
    }


def _in_path(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


def _page(max_limit: int, default: int) -> list[Schema]:
    limit = _NUMBER | {"minimum": 1, "maximum": max_limit, "default": default}
    return [
        {"name": "limit", "in": "query", "schema": limit},
        {"name": "after", "in": "query", "schema": _TEXT},
        {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
    ]


_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": _TEXT | {"format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after": _EXPIRY,
    },
}
_FILE, _FILE_ID = _json(_ref("PoolFile")), [_in_path("file_id")]
_BATCH, _BATCH_ID = _json(_ref("PoolBatch")), [_in_path("batch_id")]
_PURPOSE: Schema = {"name": "purpose", "in": "query", "schema": _TEXT}
PATHS: dict[str, dict[str, Schema]] = {
    "/v1/files": {
        "post": _operation(
            "Upload the input file of a batch.",
            "The file.",
            _FILE,
            (400, 408, 413, 429),
            body={"multipart/form-data": {"schema": _FORM}},
        ),
        "get": _operation(
            "The files of the API key.",
            "A page.",
            _json(_list_of("PoolFile")),
            (400,),
            [*_page(10_000, 10_000), _PURPOSE],
        ),
    },
    "/v1/files/{file_id}": {
        "get": _operation("One file.", "The file.", _FILE, (404,), _FILE_ID),
        "delete": _operation(
            "Delete a file.", "It is deleted.", _json({"type": "object"}), (404, 409), _FILE_ID
        ),
    },
    "/v1/files/{file_id}/content": {
        "get": _operation(
            "The content of a file.",
            "The bytes.",
            {"application/octet-stream": {}},
            (404,),
            _FILE_ID,
        )
    },
    "/v1/batches": {
        "post": _operation(
            "Begin a batch.",
            "The batch.",
            _BATCH,
            (400, 404, 413, 429),
            body=_json(_ref("NewPoolBatch")),
        ),
        "get": _operation(
            "The batches of the API key.",
            "A page.",
            _json(_list_of("PoolBatch")),
            (400,),
            _page(100, 20),
        ),
    },
    "/v1/batches/{batch_id}": {
        "get": _operation("One batch.", "The batch.", _BATCH, (404,), _BATCH_ID)
    },
    "/v1/batches/{batch_id}/cancel": {
        "post": _operation(
            "Cancel a batch; answers so far are kept.", "The batch.", _BATCH, (404, 409), _BATCH_ID
        )
    },
}
