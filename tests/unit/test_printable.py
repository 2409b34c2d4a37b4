"""Text of clients cannot speak to a terminal, and cannot look like another record of a log."""

from __future__ import annotations

import io
import logging

import pytest
from pydantic import BaseModel, Field, ValidationError

from gpupoold.units import LineFormatter, clean, plain_problem, without_controls

# Moves the cursor, writes to the clipboard, the same by a C1 character, and ends lines.
HOSTILE = "a\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b31m\x7f\r\v\f\x85\u2028b"


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
