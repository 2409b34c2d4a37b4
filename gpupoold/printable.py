"""Removal of characters that control a terminal or forge a log line."""

from __future__ import annotations

import logging
import re

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# C0 without tab and newline, DEL, C1, and Unicode's line separators.
_CONTROLS = dict.fromkeys(
    {*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029} - {ord("\t"), ord("\n")}, _REPLACEMENT
)
_CONTINUATION = "    "


def clean(text: str) -> str:
    """Return ``text`` with every unprintable character replaced, newlines too."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _REPLACEMENT for one in text)


def without_controls(text: str) -> str:
    """Return ``text``, of any number of lines, with control characters replaced."""
    return text if text.isascii() and text.isprintable() else text.translate(_CONTROLS)


class LineFormatter(logging.Formatter):
    """A formatter for records with text of clients.

    Control characters are replaced, and further lines of a record are indented, so no message can
    look like another record.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, or its lines."""
        return without_controls(super().format(record)).replace("\n", f"\n{_CONTINUATION}")


_PLAIN = (
    (re.compile(r"Value error, "), ""),
    (
        re.compile(r"Input should be a valid integer(, unable to parse string as an integer)?"),
        "must be a whole number",
    ),
    (
        re.compile(r"Input should be a valid number(, unable to parse string as a number)?"),
        "must be a number",
    ),
    (
        re.compile(r"Input should be a valid boolean(, unable to interpret input)?"),
        "must be true or false",
    ),
    (re.compile(r"Input should be a valid string"), "must be text"),
    (re.compile(r"Input should be greater than or equal to "), "must be at least "),
    (re.compile(r"Input should be less than or equal to "), "must be at most "),
    (re.compile(r"Input should be "), "must be "),
    (re.compile(r"Field required"), "is missing"),
    (re.compile(r"Extra inputs are not permitted"), "is unknown"),
)


def plain_problem(message: str) -> str:
    """Return a message of pydantic in plain words."""
    for pattern, words in _PLAIN:
        message = pattern.sub(words, message)
    return message
