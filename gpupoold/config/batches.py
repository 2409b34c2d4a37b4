"""The section ``[batches]``."""

from __future__ import annotations

from pydantic import Field

from gpupoold.config.values import Count, Duration, PositiveSize, Section

_GB = 10**9


class BatchSettings(Section):
    """``[batches]``: bounds of uploaded files and of batches."""

    max_bytes: PositiveSize = 20 * _GB
    """Files, batches and results of all API keys together."""
    max_key_bytes: PositiveSize = 4 * _GB
    """Files, batches and results of one API key; requests without a key count as one key. A file
    counts as at least 4,096 bytes, a batch with its metadata.
    """
    max_file_bytes: PositiveSize = _GB // 5
    """One file."""
    max_key_files: Count = 10_000
    """Files of one API key, results included."""
    max_key_batches: Count = 10_000
    """Batches of one API key, ended batches included until removed."""
    max_requests: Count = 50_000
    """Requests of one batch."""
    max_live: int = Field(default=64, ge=1, le=1024)
    """Requests of batches that run, or wait for a device with time to spare, at once. Of these one
    batch has at most three quarters and one API key seven eighths, less with others; a free place
    goes to the key with the fewest.
    """
    keep_s: Duration = Field(default=30 * 86_400.0, alias="keep")
    """Time after which files and ended batches are removed."""
