"""The OpenAPI description of files and batches."""

from __future__ import annotations

from typing import Any

from gpupoold.frontend.batches.input_file import ENDPOINTS

Schema = dict[str, Any]

_TEXT, _NUMBER, _MAYBE_NUMBER = (
    {"type": "string"},
    {"type": "integer"},
    {"type": ["integer", "null"]},
)
_MAYBE_TEXT = {"type": ["string", "null"]}
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
            "status": {
                "enum": [
                    "validating",
                    "in_progress",
                    "finalizing",
                    "completed",
                    "failed",
                    "expired",
                    "cancelling",
                    "cancelled",
                ]
            },
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


def _answers(description: str, schema: Schema, *others: int) -> Schema:
    texts = {
        400: "The request is wrong.",
        408: "The file arrives too slowly.",
        404: "There is none, or it belongs to another key.",
        409: "The status does not allow this.",
        413: "The file is too large.",
        429: "A bound of space or number is reached.",
        503: "The disk fails, or the server is starting.",
    }
    answer = {"description": description, "content": {"application/json": {"schema": schema}}}
    json_answer: Schema = {"content": {"application/json": {"schema": {}}}}
    refusals = {
        str(status): {"description": texts[status]} | json_answer for status in (*others, 503)
    }
    return {"200": answer} | refusals


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
PATHS: dict[str, dict[str, Schema]] = {
    "/v1/files": {
        "post": {
            "summary": "Upload the input file of a batch.",
            "requestBody": {
                "required": True,
                "content": {"multipart/form-data": {"schema": _FORM}},
            },
            "responses": _answers("The file.", _ref("PoolFile"), 400, 408, 413, 429),
        },
        "get": {
            "summary": "The files of the API key.",
            "parameters": [
                *_page(10_000, 10_000),
                {"name": "purpose", "in": "query", "schema": _TEXT},
            ],
            "responses": _answers("A page.", _list_of("PoolFile"), 400),
        },
    },
    "/v1/files/{file_id}": {
        "get": {
            "summary": "One file.",
            "parameters": [_in_path("file_id")],
            "responses": _answers("The file.", _ref("PoolFile"), 404),
        },
        "delete": {
            "summary": "Delete a file.",
            "parameters": [_in_path("file_id")],
            "responses": _answers("It is deleted.", {"type": "object"}, 404, 409),
        },
    },
    "/v1/files/{file_id}/content": {
        "get": {
            "summary": "The content of a file.",
            "parameters": [_in_path("file_id")],
            "responses": _answers("", {}, 404)
            | {"200": {"description": "The bytes.", "content": {"application/octet-stream": {}}}},
        }
    },
    "/v1/batches": {
        "post": {
            "summary": "Begin a batch.",
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _ref("NewPoolBatch")}},
            },
            "responses": _answers("The batch.", _ref("PoolBatch"), 400, 404, 413, 429),
        },
        "get": {
            "summary": "The batches of the API key.",
            "parameters": _page(100, 20),
            "responses": _answers("A page.", _list_of("PoolBatch"), 400),
        },
    },
    "/v1/batches/{batch_id}": {
        "get": {
            "summary": "One batch.",
            "parameters": [_in_path("batch_id")],
            "responses": _answers("The batch.", _ref("PoolBatch"), 404),
        }
    },
    "/v1/batches/{batch_id}/cancel": {
        "post": {
            "summary": "Cancel a batch; answers so far are kept.",
            "parameters": [_in_path("batch_id")],
            "responses": _answers("The batch.", _ref("PoolBatch"), 404, 409),
        }
    },
}
