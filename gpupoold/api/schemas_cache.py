"""Bodies of the admin API about weights snapshots."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gpupoold.api.schemas import Body


class SnapshotPlace(Body):
    """The place of a model's snapshot for devices of ``num_gpus`` GPUs."""

    num_gpus: int
    state: Literal["host", "disk", "none"]
    num_bytes: int
    is_saved: bool


class CachedModel(Body):
    """A model's weights snapshots: in host memory, on disk only, or absent.

    ``snapshots`` has one entry for each number of GPUs of the model's devices. ``state`` is "host"
    if one of these is in host memory; ``is_saved`` means all. ``num_bytes`` is the sum of the
    sizes, of the expected sizes of absent snapshots too. ``last_used_at`` is in wall-clock seconds.
    """

    name: str
    state: Literal["host", "disk", "none"]
    num_bytes: int
    is_saved: bool
    is_pinned: bool
    num_live: int
    last_used_at: float | None
    snapshots: list[SnapshotPlace] = Field(default=[])


class CacheInfo(Body):
    """``GET /cache``: bytes used of the budgets for snapshots, and the models' snapshots."""

    host_bytes: int
    host_limit_bytes: int
    disk_bytes: int
    disk_limit_bytes: int
    models: list[CachedModel]


class SetCachedRequest(Body):
    """``PATCH /cache/{name}``."""

    is_pinned: bool
