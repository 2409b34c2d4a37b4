"""What JSON texts are made of, counted without a parser."""

from __future__ import annotations

import json

import pytest

from gpupoold.frontend import body
from gpupoold.frontend.body import JsonScan, TooMuchJson


def scan(text: str | bytes, piece_bytes: int = 1 << 20) -> JsonScan:
    found, data = JsonScan(), text.encode() if isinstance(text, str) else text
    for start in range(0, len(data), piece_bytes):
        found.feed(data[start : start + piece_bytes])
    return found


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 1000])
def test_strings_are_no_structure(piece_bytes: int) -> None:
    value = {"a[{,": ['quote " and [ \\ ]', "\\\\", '\\"', "é,"], "b": {}}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        found = scan(text, piece_bytes)
        assert (found.num_containers, found.num_strings) == (3, 6)


def test_numbers_count_too() -> None:
    assert scan(json.dumps([1, 2.5, None, True, [3]])).num_values == 7


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("[" * 101, "100 levels"),
        ("[" + "[]," * 5_001, "5,000 objects and arrays"),
        ("[" + '{"a":{}},' * 2_501, "5,000 objects and arrays"),
        ("[" + '"",' * 50_001, "50,000 strings"),
        ("{" + '"a":1,' * 50_001, "50,000 strings"),
        ("[" + "1," * 310_001, "310,000 values"),
    ],
)
def test_bounds(text: str, bound: str) -> None:
    with pytest.raises(TooMuchJson, match=bound):
        scan(text)
    with pytest.raises(TooMuchJson, match=bound):
        scan(text, 4096)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100 + "]" * 100,
        json.dumps([[]] * (body.MAX_CONTAINERS - 1)),
        json.dumps(["a"] * body.MAX_STRINGS),
        json.dumps([7] * 200_000),
        json.dumps("[{,\\" * 2_000_000),
    ],
)
def test_within_the_bounds(text: str) -> None:
    scan(text)
    scan(text, 65_536)


@pytest.mark.parametrize("text", [b"]" * 300_000, b"\\" * 300_001, b'"' * 99_999, b"\xff" * 9])
def test_what_is_no_json_is_left_to_the_parser(text: bytes) -> None:
    scan(text, 65_536)
