"""Lines of input files: what is a request, and what is wrong with a line."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gpupoold.frontend.batches.files import (
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
    return [(one.number, one.problem.code) for one in found if one.problem is not None]


def test_a_request() -> None:
    line = parse_line(text(messages=[1, 2], stream=False), CHAT)
    assert (line.custom_id, line.url, line.model) == ("a", CHAT, "m")
    assert json.loads(line.body) == {"model": "m", "messages": [1, 2], "stream": False}


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


def test_problems_have_the_lines_of_the_file_and_results_count_requests(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\n".join([text("a"), b"", b"  ", text("b"), b"?", text("a")]) + b"\n")
    assert problems(path) == [(5, "invalid_json_line"), (6, "duplicate_custom_id")]
    path.write_bytes(b"\n".join([text("a"), b"", text("b"), text("c")]))
    found = [(number, line.custom_id) for number, line in lines_of(path, CHAT, frozenset({1}))]
    assert found == [(0, "a"), (2, "c")]


def test_too_many_and_none(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\n".join(text(str(number)) for number in range(5)))
    assert problems(path, 5) == []
    assert problems(path, 4) == [(5, "too_many_requests")]
    path.write_bytes(b"\n \n")
    assert problems(path) == [(1, "empty_file")]


def test_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(BOM_UTF8 + text("a") + b"\n" + text("b"))
    assert problems(path) == []
    assert [line.custom_id for _, line in lines_of(path, CHAT, frozenset())] == ["a", "b"]
    path.write_bytes(text("a").decode().encode("utf-16"))
    [checked] = check_lines(path, CHAT, 100)
    assert (checked.number, str(checked.problem)) == (1, "the file is in UTF-16: write it in UTF-8")


def test_a_line_that_is_cut_off_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"x" * (MAX_LINE_BYTES + 5) + b"\n" + text("a") + b"\n{}")
    assert [number for number, _ in problems(path)] == [1, 1, 3]


def test_a_line_without_end_costs_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "in"
    with path.open("wb") as file:
        file.truncate(3 * MAX_LINE_BYTES)
    assert {code for _, code in problems(path)} == {"invalid_json_line"}
