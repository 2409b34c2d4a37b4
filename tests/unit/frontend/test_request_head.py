"""What the frontend reads of a body: model, id, and how many answers are asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpupoold.frontend.body import MAX_PROMPTS, Head, check_num_requests, read_head
from gpupoold.frontend.errors import ApiError

COMPLETIONS = "/v1/completions"
BATCH = "/v1/chat/completions/batch"


def head(path: str = COMPLETIONS, **fields: Any) -> Head:
    return read_head(json.dumps(fields).encode(), path)


def test_everything_else_is_skipped() -> None:
    found = read_head(b'{"x": [{"model": "x", "n": 9}], "model": "y"}', COMPLETIONS)
    assert found == Head("y", False, 1, 1)
    with pytest.raises(ApiError, match="not valid JSON"):
        read_head(b'{"model": "y"} trailing', COMPLETIONS)


def test_surrogates_are_refused_before_they_are_decoded_one_by_one() -> None:
    body = b'{"model": "y", "user": "%s"}'
    assert read_head(body % ("\ud55c\U0001f600" * 9).encode(), COMPLETIONS).model == "y"
    for surrogate in ("\ud800", "\udfff"):
        text = surrogate.encode("utf-8", "surrogatepass") * 1_000_000
        with pytest.raises(ApiError, match="not valid UTF-8: it has a surrogate"):
            read_head(body % text, COMPLETIONS)


@pytest.mark.parametrize(
    ("prompt", "num"),
    [
        ("a", 1),
        (None, 1),
        ([], 0),
        ([1, 2, 3], 1),
        ([-1, 2], 1),
        (["a"], 1),
        (["a", "b"], 2),
        ([[1, 2], [3]], 2),
        ([{}, {}], 2),
        ([["[", 1]] * 7, 7),
        ({"a": [1, 2]}, 1),
    ],
)
def test_prompts(prompt: object, num: int) -> None:
    assert head(prompt=prompt).num_prompts == num
    spaced = json.dumps({"prompt": prompt}, indent=9).encode()
    assert read_head(spaced, COMPLETIONS).num_prompts == num


def test_conversations() -> None:
    one = [{"role": "user", "content": "hi"}]
    assert head(BATCH, messages=[one] * 3).num_prompts == 3
    assert head("/v1/chat/completions", messages=one * 3).num_prompts == 1
    with pytest.raises(ApiError, match=f"513 prompts, more than the {MAX_PROMPTS}"):
        head(BATCH, messages=[one] * 513)


@pytest.mark.parametrize(
    ("n", "num"),
    [(3, 3), ("3", 3), (3.0, 3), (True, 1), (None, 1), (0, 1), (-2, 1), ("x", 1), ([9], 1)],
)
def test_samples(n: object, num: int) -> None:
    """As vLLM reads ``n``; what is none it refuses itself."""
    assert head(n=n).num_samples == num


@pytest.mark.parametrize("n", [129, "129", 129.0, 16384, 10**30, 1e300])
def test_too_many_samples(n: object) -> None:
    with pytest.raises(ApiError, match="`n` must be at most 128"):
        head(n=n)


def test_too_many_prompts() -> None:
    with pytest.raises(ApiError, match="1,024 prompts, more than the 512"):
        head(prompt=["a"] * 1024, n=16384 // 128)


def test_no_number_is_infinite() -> None:
    with pytest.raises(ApiError, match="out of range"):
        read_head(b'{"n": 1e999}', COMPLETIONS)


def test_bound_of_answers() -> None:
    asked = head(prompt=["a", "b"], n=3)
    check_num_requests(asked, 6)
    with pytest.raises(ApiError, match=r"6 answers \(2 prompts, `n` = 3\), more than the 5 "):
        check_num_requests(asked, 5)


@pytest.mark.parametrize("request_id", ["x" * 129, "", "a b", "é", 7, None, ["x"], "a\n"])
def test_ids_that_are_refused(request_id: object) -> None:
    with pytest.raises(ApiError, match="128 printable"):
        head(request_id=request_id)


def test_ids_that_are_taken() -> None:
    assert head(request_id="!" * 127 + "~").has_id
    assert not head().has_id
