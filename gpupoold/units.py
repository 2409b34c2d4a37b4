"""Text for people: ``500ms``, ``5m``, ``24GiB``; and foreign text without control characters.

Control characters could control a terminal or forge a log line.
"""

from __future__ import annotations

import logging
import math
import re
from decimal import Decimal

_DURATION_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE_BYTES: dict[str, int] = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((f"{letter}b", 1000), (f"{letter}ib", 1024))
}
_SIZE_NAMES = {"": 1} | {
    f"{letter}{'i' if base == 1024 else ''}B": base**power
    for base in (1024, 1000)
    for power, letter in enumerate("KMGT" if base == 1024 else "kMGT", start=1)
}
_NUMBER_UNIT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")

OFF, STEADY = "off", "steady"
_LEAST_GAP_S = 0.001
_MAX_CHARS = 32

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# C0 without tab and newline, DEL, C1, and Unicode's line separators.
_CONTROLS = dict.fromkeys(
    {*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029} - {ord("\t"), ord("\n")}, _REPLACEMENT
)
_CONTINUATION = "    "


def parse_duration_s(text: str) -> float:
    """Return the seconds in ``text``. A number other than zero needs a unit.

    Raises ValueError: ``text`` is not a duration, or has no unit; the message says what to write.
    """
    number, unit = _split(text, "a duration such as 500ms, 2s or 5m")
    if not unit and number:
        bare = text.strip()
        raise ValueError(f"{text!r} has no unit: write {bare}ms or {bare}s")
    if unit.lower() not in _DURATION_S | {"": 1.0}:
        raise ValueError(f"{text!r}: unknown unit {unit!r}, use us, ms, s, m, h or d")
    return number * _DURATION_S.get(unit.lower(), 1.0)


def parse_size_bytes(text: str) -> int:
    """Return the bytes in ``text``; ``kB`` is 1000, ``KiB`` is 1024, a bare number is bytes.

    Raises ValueError: ``text`` is not a size; the message names the accepted units.
    """
    number, unit = _split(text, "a size such as 24GiB or 500MB")
    if unit.lower() not in _SIZE_BYTES:
        units = "B, kB, KiB, MB, MiB, GB, GiB, TB or TiB"
        raise ValueError(f"{text!r}: unknown unit {unit!r}, use {units}")
    return round(number * _SIZE_BYTES[unit.lower()])


def exact_size(num_bytes: int) -> str:
    """Return the shortest text without a fraction that ``parse_size_bytes`` reads as this size.

    ``num_bytes`` is at most 8 PiB.
    """
    found = [
        f"{num_bytes // unit_bytes}{name}"
        for name, unit_bytes in _SIZE_NAMES.items()
        if num_bytes % unit_bytes == 0
    ]
    return min(found, key=len) if num_bytes else "0"


def exact_duration(seconds: float) -> str:
    """Return a text that ``parse_duration_s`` reads as exactly this duration, above 0 s."""
    for unit, unit_s in reversed(_DURATION_S.items()):
        text = f"{round(seconds / unit_s)}{unit}"
        if seconds >= unit_s and parse_duration_s(text) == seconds:
            return text
    return f"{Decimal(repr(seconds)):f}s"


def format_duration(seconds: float) -> str:
    """Return a short form with three significant digits: ``1.25s``, ``340ms``, ``12us``."""
    if seconds < 0.9995e-3:
        return f"{_digits(seconds * 1e6)}us"
    if seconds < 0.9995:
        return f"{_digits(seconds * 1e3)}ms"
    if seconds < 120:
        return f"{_digits(seconds)}s"
    if seconds < 7200:
        return f"{_digits(seconds / 60)}m"
    return f"{_digits(seconds / 3600)}h"


def format_bytes(num_bytes: float) -> str:
    """Return binary units with three significant digits: ``1.5 GiB``, ``512 B``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1023.5:
            return f"{_digits(num_bytes)} {unit}"
        num_bytes /= 1024
    return f"{_digits(num_bytes)} TiB"


def format_energy(joules: float) -> str:
    """Return a short form with three significant digits: ``12J``, ``3.4Wh``, ``1.25kWh``."""
    watt_hours = joules / 3600
    if watt_hours < 0.9995:
        return f"{_digits(joules)}J"
    if watt_hours < 999.5:
        return f"{_digits(watt_hours)}Wh"
    return f"{_digits(watt_hours / 1000)}kWh"


def _digits(value: float) -> str:
    """Return three significant digits, without an exponent for large numbers."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _split(text: str, wanted: str) -> tuple[float, str]:
    match = _NUMBER_UNIT.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not {wanted}")
    return float(match[1]), match[2]


def gap_s_of(text: str) -> float | None:
    """Return the gap between two tokens in seconds, None for ``off``.

    The gap is infinite for ``steady``, which stands for the model's TBT target. Raises ValueError:
    the text is no pace; the message says what is.
    """
    wanted = text.strip().lower()
    if wanted == OFF:
        return None
    if wanted == STEADY:
        return math.inf
    gap_s = _gap_s(wanted) if len(wanted) <= _MAX_CHARS else 0.0
    if gap_s < _LEAST_GAP_S:
        raise ValueError(
            f"{text[:_MAX_CHARS]!r} is no pace: write `{STEADY}`, `{OFF}` or a duration of at "
            "least 1 ms, such as `50ms`"
        )
    return gap_s


def _gap_s(text: str) -> float:
    """Return the gap in seconds, 0 for a text that is no duration."""
    try:
        return parse_duration_s(text)
    except ValueError:
        return 0.0


def checked_pace(text: str) -> str:
    """Return the text of a pace in lower case, without spaces around; empty stays empty.

    Raises ValueError: see :func:`gap_s_of`.
    """
    if text:
        gap_s_of(text)
    return text.strip().lower()


def clean(text: str) -> str:
    """Return ``text`` with every unprintable character replaced, newlines too."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _REPLACEMENT for char in text)


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
