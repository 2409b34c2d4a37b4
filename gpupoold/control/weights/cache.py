"""The model cache: weights snapshots in shared host memory, owned by the daemon. Bookkeeping."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CachedSnapshot:
    """A model's snapshot: the daemon's memfd descriptor, and the digest of the layout.

    ``self_check`` has the tokens that the model answers to its self-check.
    """

    fd: int
    num_bytes: int
    digest: str
    self_check: tuple[int, ...] = ()


class FdStorePort(Protocol):
    """Storage of snapshots beyond the daemon's life."""

    def store(self, model: str, snapshot: CachedSnapshot) -> None:
        """Store the model's snapshot."""

    def release(self, snapshot: CachedSnapshot) -> None:
        """Remove a snapshot from the storage."""


class SnapshotCache:
    """One snapshot per model within a byte budget; all workers share the memory.

    ``fd_store`` keeps the snapshots beyond the daemon's life. ``now`` returns wall-clock seconds.
    ``pinned`` are the models whose snapshots stay. Bytes of reserved and retired snapshots count as
    used. ``num_evicted`` counts snapshots evicted before their model was removed.
    """

    def __init__(
        self,
        budget_bytes: int,
        fd_store: FdStorePort | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._fd_store = fd_store
        self.pinned: set[str] = set()
        self.num_evicted = 0
        self._now = now
        self._snapshots: dict[str, CachedSnapshot] = {}
        self._leaving: dict[str, CachedSnapshot] = {}
        self._reserved_bytes: dict[str, int] = {}
        self._last_used_at: dict[str, float] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all snapshots, including reserved and retired snapshots."""
        snapshots = (*self._snapshots.values(), *self._leaving.values())
        return sum(snapshot.num_bytes for snapshot in snapshots) + sum(
            self._reserved_bytes.values()
        )

    @property
    def snapshots(self) -> dict[str, CachedSnapshot]:
        """The snapshots by model, without reserved and retired snapshots."""
        return dict(self._snapshots)

    def get(self, model: str) -> CachedSnapshot | None:
        """Return the model's snapshot if in host memory."""
        return self._snapshots.get(model)

    def short_bytes(self, model: str, num_bytes: int) -> int:
        """Return by how much a snapshot of ``num_bytes`` would exceed the budget, or 0.

        The model's present snapshot counts as replaced.
        """
        others_bytes = self.used_bytes - self._reserved_bytes.get(model, 0)
        if (snapshot := self._snapshots.get(model)) is not None:
            others_bytes -= snapshot.num_bytes
        return max(0, others_bytes + num_bytes - self.budget_bytes)

    def reserve(self, model: str, num_bytes: int) -> None:
        """Reserve ``num_bytes`` for the model's snapshot."""
        snapshot = self._snapshots.get(model)
        held_bytes = 0 if snapshot is None else snapshot.num_bytes
        self._reserved_bytes[model] = max(0, num_bytes - held_bytes)

    def release(self, model: str) -> None:
        """Release a reservation."""
        self._reserved_bytes.pop(model, None)

    def put(
        self, model: str, fd: int, digest: str, self_check: tuple[int, ...] = ()
    ) -> CachedSnapshot:
        """Add the snapshot behind ``fd`` and drop the reservation; the cache then owns ``fd``.

        An identical present snapshot is kept instead.
        """
        self.release(model)
        old = self._snapshots.get(model)
        snapshot = CachedSnapshot(fd, os.fstat(fd).st_size, digest, self_check)
        if old is not None and _is_same(old, snapshot):
            os.close(fd)
            return old
        self.drop(model)
        self._snapshots[model] = snapshot
        if self._fd_store is not None:
            self._fd_store.store(model, snapshot)
        return snapshot

    def retire(self, model: str) -> None:
        """Remove the snapshot while its memory still counts as used."""
        snapshot = self._snapshots.pop(model)
        self._drop_from_fd_store(snapshot)
        self._leaving[model] = snapshot
        self.num_evicted += 1

    def drop_retired(self, model: str) -> None:
        """Drop a retired snapshot after all workers have released the memory."""
        self._close(self._leaving, model)

    def drop(self, model: str) -> None:
        """Drop the snapshot; the memory is freed when no worker maps the snapshot."""
        if (snapshot := self._snapshots.get(model)) is not None:
            self._drop_from_fd_store(snapshot)
        self._close(self._snapshots, model)

    def touch(self, model: str, at: float | None = None) -> None:
        """Record a use of the model, now or ``at`` (wall-clock seconds)."""
        self._last_used_at[model] = self._now() if at is None else at

    def last_used_at(self, model: str) -> float | None:
        """Return the time of the model's last use in wall-clock seconds, None if unknown."""
        return self._last_used_at.get(model)

    def forget(self, model: str) -> None:
        """Forget a removed model and its snapshot."""
        self.drop(model)
        self.release(model)
        self.pinned.discard(model)
        self._last_used_at.pop(model, None)

    def close(self) -> None:
        """Close all snapshots; the fd store keeps its copies."""
        for snapshots in (self._snapshots, self._leaving):
            for model in list(snapshots):
                self._close(snapshots, model)

    def _drop_from_fd_store(self, snapshot: CachedSnapshot) -> None:
        if self._fd_store is not None:
            self._fd_store.release(snapshot)

    @staticmethod
    def _close(snapshots: dict[str, CachedSnapshot], model: str) -> None:
        snapshot = snapshots.pop(model, None)
        if snapshot is not None:
            os.close(snapshot.fd)


def _is_same(one: CachedSnapshot, other: CachedSnapshot) -> bool:
    is_alike = (one.digest, one.self_check) == (other.digest, other.self_check)
    return is_alike and os.path.sameopenfile(one.fd, other.fd)
