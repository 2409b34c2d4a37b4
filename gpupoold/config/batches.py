"""The section ``[batches]``."""

from __future__ import annotations

from pydantic import Field

from gpupoold.config.values import Count, Duration, PositiveSize, Section

_GB = 10**9


class BatchSettings(Section):
    """``[batches]``: bounds of uploaded files and of batches.

    ``max_key_bytes`` bounds the files and results of one API key, ``max_bytes`` those of all keys;
    ``max_key_files`` and ``max_key_batches`` bound their numbers.
    ``max_live`` requests of batches run or wait at once. Files and ended batches are removed after
    ``keep``.
    """

    max_bytes: PositiveSize = 20 * _GB
    max_key_bytes: PositiveSize = 4 * _GB
    max_file_bytes: PositiveSize = _GB // 5
    max_key_files: Count = 10_000
    max_key_batches: Count = 10_000
    max_requests: Count = 50_000
    max_live: int = Field(default=64, ge=1, le=1024)
    keep_s: Duration = Field(default=30 * 86_400.0, alias="keep")
