"""Durations and sizes as people write and read them; targets and errors."""

from __future__ import annotations

import io
import logging
import math

import pytest
from hypothesis import given, strategies as st
from pydantic import BaseModel, Field, ValidationError

from gpupoold.domain import Targets
from gpupoold.errors import ALL_ERRORS, Failed, GpupoolError, Unavailable, error_from_code
from gpupoold.units import (
    LineFormatter,
    clean,
    format_bytes,
    format_duration,
    parse_duration_s,
    parse_size_bytes,
    plain_problem,
    without_controls,
)

# Moves the cursor, writes to the clipboard, the same by a C1 character, and ends lines.
HOSTILE = "a\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b31m\x7f\r\v\f\x85\u2028b"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("2s", 2.0),
        (" 1.5 h ", 5400.0),
        ("5M", 300.0),
        ("250us", 250e-6),
        ("1d", 86400.0),
        ("0", 0.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("24GiB", 24 << 30),
        ("1.5GB", 1_500_000_000),
        ("500 MB", 500_000_000),
        ("64kib", 65536),
        ("2TiB", 2 << 40),
        ("7B", 7),
        ("123", 123),
        ("1.005kB", 1005),
        ("0", 0),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "fast", "-1s", "1e3s", "1.s", "1 s s", "inf", "nan"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration such as"):
        parse_duration_s(text)
    with pytest.raises(ValueError, match="is not a size such as"):
        parse_size_bytes(text)


@pytest.mark.parametrize("text", ["100", " 2.5 ", "0.1"])
def test_a_duration_without_a_unit_has_two_readings(text: str) -> None:
    bare = text.strip()
    with pytest.raises(ValueError, match=f"has no unit: write {bare}ms or {bare}s$"):
        parse_duration_s(text)


def test_unknown_units_are_named() -> None:
    with pytest.raises(ValueError, match=r"'3 weeks': unknown unit 'weeks', use us, ms"):
        parse_duration_s("3 weeks")
    with pytest.raises(ValueError, match=r"'3s': unknown unit 's', use B, kB"):
        parse_size_bytes("3s")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0us"),
        (12e-6, "12us"),
        (0.0009999, "1ms"),
        (0.34, "340ms"),
        (0.99999, "1s"),
        (1.25, "1.25s"),
        (119.0, "119s"),
        (300, "5m"),
        (7199, "120m"),
        (7200, "2h"),
        (3600 * 5000, "5000h"),
    ],
)
def test_formatted_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1000, "1000 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1024 * 1023.9, "1 MiB"),
        (3 << 29, "1.5 GiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_formatted_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.floats(1e-6, 1e8))
def test_a_formatted_duration_reads_back(seconds: float) -> None:
    text = format_duration(seconds)
    assert "e" not in text
    assert parse_duration_s(text) == pytest.approx(seconds, rel=0.0051)


@given(st.integers(0, 1 << 60))
def test_formatted_bytes_read_back(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    assert "e" not in text
    assert parse_size_bytes(text) == pytest.approx(num_bytes, rel=0.0051)


def test_deadlines() -> None:
    targets = Targets(2.0, 0.5)
    assert targets.deadline_s(10.0, 0) == 12.0
    assert targets.deadline_s(10.0, 4) == 14.0


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_targets_are_positive_and_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        Targets(ttft_s=bad)
    with pytest.raises(ValueError, match="positive and finite"):
        Targets(tbt_s=bad)


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_errors_cross_processes_by_their_code(kind: type[GpupoolError]) -> None:
    error = error_from_code(kind.code, "what", "do this")
    assert type(error) is kind
    assert (error.message, error.hint, str(error)) == ("what", "do this", "what (do this)")


def test_codes_are_unique_and_unknown_ones_are_failures() -> None:
    assert len({kind.code for kind in ALL_ERRORS}) == len(ALL_ERRORS)
    assert type(error_from_code("from the future", "what")) is Failed
    assert str(Failed("what")) == "what"
    assert Unavailable("not now", retry_after_s=3.0).retry_after_s == 3.0


def test_what_comes_from_outside_cannot_speak_to_the_terminal() -> None:
    assert clean("a\x1b[2Jb\nc\u202ed") == "a\ufffd[2Jb\ufffdc\ufffdd"
    assert clean("コーダー é") == "コーダー é"


def test_text_of_several_lines_keeps_them() -> None:
    shown = without_controls(HOSTILE + "\n\tc é 👩‍💻\u3000d")
    assert shown.endswith("\n\tc é 👩‍💻\u3000d")
    assert len(shown.splitlines()) == 2
    assert not any(ord(one) < 0x20 or 0x7F <= ord(one) < 0xA0 for one in shown if one not in "\n\t")


@pytest.mark.parametrize("text", ["plain", "", "two\nlines\n"])
def test_harmless_text_is_unchanged(text: str) -> None:
    assert without_controls(text) == text


def test_a_record_cannot_be_forged() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("%(levelname)s %(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.info("id %s", "x\nERROR the disk is full\x1b[2J")
    try:
        raise ValueError("y\rz\nERROR it burns")
    except ValueError:
        logger.exception("failed")
    lines = stream.getvalue().split("\n")
    assert [line for line in lines if not line.startswith("    ")] == [
        "INFO id x",
        "ERROR failed",
        "",
    ]
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


class _Body(BaseModel, extra="forbid"):
    number: int = Field(default=1, ge=1, le=9)
    share: float = 1.0
    is_on: bool = True
    text: str = ""


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("number", "one", "must be a whole number"),
        ("number", 0, "must be at least 1"),
        ("number", 10, "must be at most 9"),
        ("share", "half", "must be a number"),
        ("is_on", "perhaps", "must be true or false"),
        ("text", 1, "must be text"),
        ("other", 1, "is unknown"),
    ],
)
def test_problems_in_plain_words(field: str, value: object, words: str) -> None:
    with pytest.raises(ValidationError) as found:
        _Body.model_validate({field: value})
    assert plain_problem(found.value.errors()[0]["msg"]) == words
