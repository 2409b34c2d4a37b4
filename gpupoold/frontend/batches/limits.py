"""Bounds of files and batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """Where files and batches are, and how much they may be; see ``[batches]``.

    ``max_live`` requests of batches run at once. ``runs_batches`` is true in one frontend.
    """

    folder: Path
    max_bytes: int
    max_key_bytes: int
    max_file_bytes: int
    max_requests: int
    max_live: int
    keep_s: float
    max_key_files: int
    max_key_batches: int
    runs_batches: bool
