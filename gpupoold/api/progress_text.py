"""The progress of an addition in words, for all interfaces. Pure."""

from __future__ import annotations

from gpupoold.api.schemas import AdditionInfo
from gpupoold.api.schemas_models import Progress
from gpupoold.units import format_bytes, format_duration

STAGE_WORDS = {
    "resolve": "finding the checkpoint",
    "download": "downloading",
    "check": "checking",
    "load": "loading",
    "spread": "serving; loading on further devices",
    "ready": "ready",
}


def stage_text(progress: Progress | AdditionInfo) -> str:
    """Return the stage, with the size in total if known."""
    words = STAGE_WORDS.get(progress.stage, progress.stage)
    return f"{words} {format_bytes(progress.total_bytes)}" if progress.total_bytes else words


def amount_text(progress: Progress | AdditionInfo) -> str:
    """Return bytes, share, rate and remaining time as far as known, else nothing.

    For example ``3.1 GiB of 14.2 GiB, 22 %, 112 MiB/s, 102s left``.
    """
    done_bytes, total_bytes = progress.done_bytes, progress.total_bytes
    if done_bytes is None or not total_bytes:
        return ""
    text = f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}"
    parts = (text, f"{100 * done_bytes // total_bytes} %", speed_text(progress))
    return ", ".join(part for part in parts if part)


def speed_text(progress: Progress | AdditionInfo) -> str:
    """Return rate and remaining time as far as known, else nothing."""
    left_bytes = (progress.total_bytes or 0) - (progress.done_bytes or 0)
    if not progress.bytes_per_s or left_bytes <= 0:
        return ""
    left_s = max(1.0, float(round(left_bytes / progress.bytes_per_s)))
    return f"{format_bytes(progress.bytes_per_s)}/s, {format_duration(left_s)} left"
