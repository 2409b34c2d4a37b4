"""The open file descriptors of the test process."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path("/proc/self/fd")


def open_descriptors() -> dict[str, str]:
    """Return each descriptor's number and file, without the descriptor of the listing."""
    return {name: os.readlink(_FOLDER / name) for name in os.listdir(_FOLDER) if _is_open(name)}


def opened_since(before: dict[str, str]) -> dict[str, str]:
    """Return the descriptors that are open now and were not in ``before``.

    Descriptors that are gone do not count: garbage collection may close at any time what an
    earlier test of the same process left. Libraries do not count either, which a thread of an
    earlier test may still be importing.
    """
    opened = open_descriptors().items() - before.items()
    return {number: file for number, file in opened if ".so" not in Path(file).suffixes}


def _is_open(name: str) -> bool:
    return (_FOLDER / name).is_symlink()
