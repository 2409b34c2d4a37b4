"""Short forms of numbers, for columns a few cells wide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, tzinfo

from gpupoold.units import format_duration

NOTHING = "-"
_UNITS = ("B", "K", "M", "G", "T")


def duration(seconds: float | None) -> str:
    """As ``1.25s`` or ``340ms``; five cells at most below 10,000 hours."""
    return NOTHING if seconds is None else format_duration(max(0.0, seconds))


def size(num_bytes: float) -> str:
    """Binary units with three digits: ``14.2G``, ``512M``, ``0``."""
    if num_bytes <= 0:
        return "0"
    for unit in _UNITS[:-1]:
        if num_bytes < 999.5:
            return f"{num_bytes:.3g}{unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g}{_UNITS[-1]}" if num_bytes < 999.5 else f"{num_bytes:.0f}{_UNITS[-1]}"


def count(number: float) -> str:
    """Counts and rates: ``0``, ``9.5``, ``240``, ``12.4k``, ``3.1M``."""
    if number < 10 and number != int(number):
        return f"{number:.1f}"
    if number < 9_999.5:
        return f"{number:.0f}"
    for unit in ("k", "M"):
        number /= 1000
        if number < 999.5:
            return f"{number:.3g}{unit}"
    return f"{number / 1000:.3g}G"


def percent(share: float | None) -> str:
    """``97.5``; ``100`` only where all is in time, three digits at most."""
    if share is None:
        return NOTHING
    hundred = 100 * share
    if hundred >= 99.95:
        return "100" if share >= 1 else "99.9"
    return f"{hundred:.1f}"


def uptime(seconds: float) -> str:
    """``45s``, ``12m``, ``3h 05m``, ``9d 4h``."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if minutes < 1:
        return f"{int(seconds)}s"
    if hours < 1:
        return f"{minutes}m"
    if hours < 48:
        return f"{hours}h {minutes % 60:02}m"
    return f"{hours // 24}d {hours % 24}h"


def clock(at: float, zone: tzinfo | None) -> str:
    """The time of day; ``zone`` None: this machine's."""
    return datetime.fromtimestamp(at, zone).strftime("%H:%M:%S")


def ranges(numbers: Iterable[int]) -> str:
    """``0-2,5`` for 0, 1, 2 and 5."""
    return ",".join(_ranges(sorted(set(numbers))))


def _ranges(numbers: list[int]) -> Iterator[str]:
    start = 0
    for index, number in enumerate(numbers):
        is_last = index + 1 == len(numbers)
        if is_last or numbers[index + 1] != number + 1:
            first = numbers[start]
            yield f"{first}" if first == number else f"{first}-{number}"
            start = index + 1
