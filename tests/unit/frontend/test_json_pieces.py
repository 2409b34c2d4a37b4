"""JSON in pieces is the JSON of the whole."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from pydantic import BaseModel
from vllm.logprobs import Logprob

from gpupoold.frontend.large_answers import PiecewiseJson, json_pieces

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=60,
)


class Part(BaseModel):
    """A part of an answer."""

    number: int
    values: list[dict[int, Logprob] | None] | None = None


class Whole(BaseModel):
    """An answer with parts."""

    parts: list[Part]
    text: str = "é\u2028"


@given(VALUES)
def test_values(value: Any) -> None:
    assert json.loads(b"".join(json_pieces(value))) == value


def test_models_are_divided_or_whole() -> None:
    entries: list[dict[int, Logprob] | None] = [
        None,
        *({7: Logprob(-0.5, 1, "a")} for _ in "x" * 99),
    ]
    whole = Whole(parts=[Part(number=1, values=entries), Part(number=2)])
    for divided in (frozenset(), frozenset({Whole, Part})):
        assert json.loads(b"".join(json_pieces(whole, divided))) == json.loads(
            whole.model_dump_json()
        )


def test_arrays_and_numbers_that_json_lacks() -> None:
    value = {"data": [{"index": 0, "embedding": np.array([0.5, float("nan")], np.float32)}]}
    assert json.loads(b"".join(json_pieces(value))) == {
        "data": [{"index": 0, "embedding": [0.5, None]}]
    }


def sent(content: Any) -> list[dict[str, Any]]:
    """The messages of an answer with this content."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        raise AssertionError

    asyncio.run(PiecewiseJson(content)({"type": "http"}, receive, send))
    return messages


def test_a_small_answer_has_its_length_and_one_body() -> None:
    start, body = sent({"a": [1, 2]})
    assert (b"content-length", str(len(body["body"])).encode()) in start["headers"]
    assert json.loads(body["body"]) == {"a": [1, 2]}


@pytest.mark.parametrize("content", [[["x" * 50] * 100] * 100, {"a": list(range(100_000))}])
def test_a_large_answer_comes_in_pieces(content: Any) -> None:
    start, *bodies = sent(content)
    assert b"content-length" not in dict(start["headers"])
    assert len(bodies) > 3
    assert [body.get("more_body", False) for body in bodies] == [True] * (len(bodies) - 1) + [False]
    assert json.loads(b"".join(body["body"] for body in bodies)) == content
