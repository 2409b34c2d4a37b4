"""Bodies of the admin API about batches."""

from __future__ import annotations

from dataclasses import dataclass

from gpupoold.domain import BatchRecord


@dataclass(frozen=True, kw_only=True)
class BatchInfo(BatchRecord):
    """A batch for the operator, with at most eight models.

    ``key`` is the name of the API key, its id if the key was removed, empty without one. ``reason``
    says why requests wait for another try; empty if none has been refused.
    """

    key: str
    state: str
    reason: str
