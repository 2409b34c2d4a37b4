"""The description of the public surface."""

from __future__ import annotations

from typing import Any

import jsonschema  # type: ignore[import-untyped]

from gpupool_state.batches import BatchRow, FileRow
from gpupoold.frontend.batches.api import batch_object, file_object
from gpupoold.frontend.openapi import describe


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


ENGINE: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "FastAPI"},
    "paths": {
        "/v1/completions": {
            "post": {
                "requestBody": {"content": {"application/json": {"schema": _ref("Request")}}},
                "responses": {"200": {"description": "Done."}, "404": {"description": "Gone."}},
            }
        },
        "/sleep": {"get": {"responses": {"200": {"schema": _ref("Secret")}}}},
        "/v1/models": {"get": {"responses": {"200": {"schema": _ref("Secret")}}}},
    },
    "components": {
        "schemas": {
            "Request": {"properties": {"options": {"anyOf": [_ref("Options"), {}]}}},
            "Options": {"properties": {"again": _ref("Request")}},
            "Secret": {},
        }
    },
}


def test_only_what_is_served_is_described_with_what_it_refers_to() -> None:
    described = describe([ENGINE], lambda path: path == "/v1/completions")
    assert "/sleep" not in described["paths"]
    schemas = described["components"]["schemas"].keys()
    assert {one for one in schemas if "Pool" not in one} == {"Request", "Options"}
    assert described["info"]["title"] == "gpupool"


def test_refusals_are_told_beside_the_apis_own_answers() -> None:
    described = describe([ENGINE], lambda path: path == "/v1/completions")
    responses = described["paths"]["/v1/completions"]["post"]["responses"]
    assert {"200", "400", "404", "413", "429", "503"} <= responses.keys()
    assert responses["404"] == {"description": "Gone."}
    assert "503" not in ENGINE["paths"]["/v1/completions"]["post"]["responses"]


def test_own_paths_are_ours_with_or_without_a_model() -> None:
    for engines in ([], [ENGINE]):
        paths = describe(engines, lambda _: False)["paths"]
        models = {"/v1/models", "/v1/models/{model}"}
        own = {one for one in paths if not one.startswith(("/v1/files", "/v1/batches"))}
        assert own == {"/", "/health", "/ready", "/version", "/metrics", *models}
        assert "schema" not in paths["/v1/models"]["get"]["responses"]["200"]


def test_batches_are_described() -> None:
    described = describe([], lambda _: False)
    assert {"/v1/files/{file_id}/content", "/v1/batches/{batch_id}/cancel"} <= set(
        described["paths"]
    )
    assert described["components"]["schemas"].keys() == {"PoolFile", "PoolBatch", "NewPoolBatch"}


def test_objects_of_batches_are_as_described() -> None:
    rows = {
        "PoolFile": file_object(FileRow("file-1", "k", "batch", "in", 3, 1, expires_at=2)),
        "PoolBatch": batch_object(
            BatchRow(
                "batch_1",
                "/v1/completions",
                1,
                2,
                owner="k",
                input_file_id="file-1",
                completion_window="1h",
            )
        ),
    }
    schemas = describe([], lambda _: False)["components"]["schemas"]
    for name, made in rows.items():
        assert made.keys() == schemas[name]["properties"].keys()
        jsonschema.validate(made, schemas[name])
