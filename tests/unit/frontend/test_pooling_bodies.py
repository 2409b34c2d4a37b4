"""The number of engine requests in a pooling body, and inputs that are refused early."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpupoold.frontend.body import MAX_INPUTS, JsonScan, read_head
from gpupoold.frontend.conversations import POOLING_PATHS, check_input, num_inputs
from gpupoold.frontend.errors import ApiError

MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/embeddings", {"input": "x"}, 1),
        ("/v1/embeddings", {"input": ["x", "y"]}, 2),
        ("/v1/embeddings", {"input": [1, 2, 3]}, 1),
        ("/v1/embeddings", {"input": [[1, 2], [3]]}, 2),
        ("/v1/embeddings", {"input": [MESSAGE, MESSAGE]}, 1),
        ("/v1/embeddings", {"messages": [[MESSAGE], [MESSAGE, MESSAGE]]}, 2),
        ("/pooling", {"messages": [MESSAGE]}, 1),
        ("/classify", {}, 1),
        ("/classify", {"input": None}, 1),
        ("/rerank", {"query": "x", "documents": ["y", "z"]}, 3),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d"]}, 4),
        ("/score", {"data_1": "a", "data_2": "b"}, 2),
        ("/v1/score", {"queries": "a", "items": ["b"]}, 2),
    ],
)
def test_inputs_are_counted(path: str, body: dict[str, Any], count: int) -> None:
    assert num_inputs(json.dumps(body).encode(), path)[0] == count


@pytest.mark.parametrize("path", sorted(POOLING_PATHS))
def test_too_many_inputs_are_refused_by_name(path: str) -> None:
    name = "documents" if "input" not in _names(path) else "input"
    body = {"model": "m", "query": "q", name: ["x"] * (MAX_INPUTS + 1)}
    with pytest.raises(ApiError, match="inputs, more than the 2,04") as raised:
        read_head(json.dumps(body).encode(), path)
    assert raised.value.param == name


def _names(path: str) -> str:
    return "input" if path in ("/v1/embeddings", "/classify", "/pooling") else "documents"


def test_samples_do_not_count() -> None:
    head = read_head(b'{"model": "m", "input": ["a", "b"], "n": 100}', "/v1/embeddings")
    assert head.num_requests == 2


@pytest.mark.parametrize(
    "value",
    ["x", None, 7, [], ["x", "y"], [1, 2], [[1], [2, 3]], [MESSAGE], [[MESSAGE], [MESSAGE]]],
)
def test_plausible_inputs_are_left_to_vllm(value: Any) -> None:
    check_input("input", value)


@pytest.mark.parametrize(
    "value", [[1.5], [1, "x"], [True], ["x", None], [MESSAGE, "x"], [{"role": 7}], [[MESSAGE, 1]]]
)
def test_other_inputs_are_refused(value: Any) -> None:
    with pytest.raises(ApiError) as raised:
        check_input("input", value)
    assert raised.value.status == 400
    assert raised.value.param == "input"


def test_long_wrong_inputs_are_refused_before_vllm_reads_them() -> None:
    body = json.dumps({"model": "m", "input": [1.5] * 3000}).encode()
    with pytest.raises(ApiError, match="all of one kind"):
        read_head(body, "/v1/embeddings")
    body = json.dumps({"model": "m", "input": ["x", [7] * 5000]}).encode()
    with pytest.raises(ApiError, match="more than 4,096 elements"):
        read_head(body, "/v1/embeddings")


@pytest.mark.parametrize(
    ("path", "fields", "number"),
    [
        ("/v1/embeddings", {"input": ["text"] * 2_048}, 2_048),  # Elasticsearch, OpenAI's limit
        ("/v1/embeddings", {"input": [[5] * 290] * 1_000}, 1_000),  # LangChain
        ("/v1/embeddings", {"input": [5] * 8_192}, 1),  # the longest text of bge-m3
        ("/v1/embeddings", {"input": [[5] * 146] * 2_048}, 2_048),
        ("/v1/rerank", {"query": "q", "documents": ["text"] * 2_048}, 2_049),
        ("/score", {"text_1": "q", "text_2": ["text"] * 2_048}, 2_049),
    ],
)
def test_what_clients_send_is_within_the_bounds(
    path: str, fields: dict[str, Any], number: int
) -> None:
    body = json.dumps({"model": "m", **fields}).encode()
    scan = JsonScan()
    scan.feed(body)
    assert read_head(body, path).num_prompts == number
