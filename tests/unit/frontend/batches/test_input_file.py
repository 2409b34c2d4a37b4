"""Lines of input files: what is a request, and what is wrong with a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gpupoold.frontend.batches.input_file import (
    MAX_LINE_BYTES,
    LineProblem,
    check_lines,
    lines_of,
    parse_line,
)

CHAT = "/v1/chat/completions"


def text(custom_id: Any = "a", method: Any = "POST", url: Any = CHAT, **body: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": method, "url": url, "body": {"model": "m"} | body}
    return json.dumps(fields).encode()


def problems(path: Path, max_requests: int = 100) -> list[tuple[int, str]]:
    found = check_lines(path, CHAT, max_requests)
    return [(number, problem.code) for number, problem in found if problem is not None]


def test_a_request() -> None:
    line = parse_line(text(messages=[1, 2], stream=False), CHAT)
    assert (line.custom_id, line.url) == ("a", CHAT)
    assert json.loads(bytes(line.body)) == {"model": "m", "messages": [1, 2], "stream": False}


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b'{"custom_id": "a"}', "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (text(custom_id=5), "invalid_json_line", None),
        (text(model=None), "invalid_json_line", None),
        (text(custom_id=""), "invalid_custom_id", "custom_id"),
        (text(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (text(method="GET"), "invalid_method", "method"),
        (text(url="/v1/models"), "invalid_url", "url"),
        (text(stream=True), "stream_unsupported", "body.stream"),
    ],
)
def test_no_request(line: bytes, code: str, param: str | None) -> None:
    with pytest.raises(LineProblem) as caught:
        parse_line(line, CHAT)
    assert (caught.value.code, caught.value.param) == (code, param)


@given(st.binary(max_size=200))
def test_no_line_is_worse_than_a_problem(line: bytes) -> None:
    with pytest.raises(LineProblem):
        parse_line(line, CHAT)


def test_lines_are_numbered_without_empty_ones(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\n".join([text("a"), b"", b"  ", text("b"), b"?", text("a")]) + b"\n")
    assert problems(path) == [(2, "invalid_json_line"), (3, "duplicate_custom_id")]
    path.write_bytes(b"\n".join([text("a"), b"", text("b"), text("c")]))
    found = [(number, line.custom_id) for number, line in lines_of(path, CHAT, frozenset({1}))]
    assert found == [(0, "a"), (2, "c")]


def test_too_many_and_none(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\n".join(text(str(number)) for number in range(5)))
    assert problems(path, 5) == []
    assert problems(path, 4) == [(4, "too_many_requests")]
    path.write_bytes(b"\n \n")
    assert problems(path) == [(0, "empty_file")]


def test_a_line_without_end_costs_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "in"
    with path.open("wb") as file:
        file.truncate(3 * MAX_LINE_BYTES)
    assert {code for _, code in problems(path)} == {"invalid_json_line"}
