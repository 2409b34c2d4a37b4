"""Bodies of the admin API about batches."""

from __future__ import annotations

from gpupoold.api.schemas import Body


class BatchInfo(Body):
    """A batch of a client; times in wall-clock seconds.

    ``key`` is the name of the API key, its id if the key was removed, empty without one. ``models``
    has at most eight models of the requests, none before the input is checked. ``reason`` says why
    requests wait for another try, the next at ``next_try_at``; empty if none has been refused.
    """

    id: str
    key: str
    models: list[str]
    endpoint: str
    state: str
    num_requests: int
    num_completed: int
    num_failed: int
    reason: str
    created_at: int
    expires_at: int
    next_try_at: int | None
    ended_at: int | None
