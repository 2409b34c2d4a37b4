"""The model cache: weights snapshots in shared host memory, owned by the daemon. Bookkeeping."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

_STEP_S = 1e-3  # between two uses while the clock is behind the latest use

K = TypeVar("K")


class SnapshotId(NamedTuple):
    """A model's snapshot for devices of ``degree`` GPUs, with a part for each GPU."""

    model: str
    degree: int = 1

    def __str__(self) -> str:
        return f"{self.model} (groups of {self.degree})" if self.degree > 1 else self.model


@dataclass(frozen=True, slots=True)
class CachedSnapshot:
    """A snapshot: the daemon's memfd descriptor, and the digest of the layout.

    ``self_check`` has the tokens that the model answers to its self-check.
    """

    fd: int
    num_bytes: int
    digest: str
    self_check: tuple[int, ...] = ()


class FdStorePort(Protocol):
    """Storage of snapshots beyond the daemon's life."""

    def store(self, of: SnapshotId, snapshot: CachedSnapshot) -> None:
        """Store a snapshot."""

    def release(self, snapshot: CachedSnapshot) -> None:
        """Remove a snapshot from the storage."""


class SnapshotCache:
    """One snapshot per model and degree within a byte budget; all workers share the memory.

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
        self._snapshots: dict[SnapshotId, CachedSnapshot] = {}
        self._leaving: dict[SnapshotId, CachedSnapshot] = {}
        self._reserved_bytes: dict[SnapshotId, int] = {}
        self._known_bytes: dict[SnapshotId, int] = {}
        self._last_used_at: dict[str, float] = {}
        self._latest_at = 0.0
        self._uses: dict[SnapshotId, float] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all snapshots, including reserved and retired snapshots."""
        snapshots = (*self._snapshots.values(), *self._leaving.values())
        return sum(snapshot.num_bytes for snapshot in snapshots) + sum(
            self._reserved_bytes.values()
        )

    @property
    def snapshots(self) -> dict[SnapshotId, CachedSnapshot]:
        """The snapshots, without reserved and retired snapshots."""
        return dict(self._snapshots)

    def get(self, of: SnapshotId) -> CachedSnapshot | None:
        """Return a snapshot if in host memory."""
        return self._snapshots.get(of)

    def of_model(self, model: str) -> list[SnapshotId]:
        """Return the model's snapshots in host memory."""
        return [one for one in self._snapshots if one.model == model]

    def num_bytes(self, model: str) -> int:
        """Return the bytes of the model's snapshots in host memory."""
        return sum(self._snapshots[one].num_bytes for one in self.of_model(model))

    def known_bytes(self, of: SnapshotId) -> int | None:
        """Return the bytes of the present or latest snapshot, None if unknown."""
        return self._known_bytes.get(of)

    def short_bytes(self, of: SnapshotId | None, num_bytes: int) -> int:
        """Return by how much a snapshot of ``num_bytes`` would exceed the budget, or 0.

        The present snapshot of the same model and degree counts as replaced; None replaces none.
        """
        others_bytes = self.used_bytes
        if of is not None:
            others_bytes -= self._reserved_bytes.get(of, 0)
            if (snapshot := self._snapshots.get(of)) is not None:
                others_bytes -= snapshot.num_bytes
        return max(0, others_bytes + num_bytes - self.budget_bytes)

    def reserve(self, of: SnapshotId, num_bytes: int) -> None:
        """Reserve ``num_bytes`` for a snapshot."""
        snapshot = self._snapshots.get(of)
        held_bytes = 0 if snapshot is None else snapshot.num_bytes
        self._reserved_bytes[of] = max(0, num_bytes - held_bytes)

    def release(self, of: SnapshotId) -> None:
        """Release a reservation."""
        self._reserved_bytes.pop(of, None)

    def put(
        self, of: SnapshotId, fd: int, digest: str, self_check: tuple[int, ...] = ()
    ) -> CachedSnapshot:
        """Add the snapshot behind ``fd`` and drop the reservation; the cache then owns ``fd``.

        An identical present snapshot is kept instead.
        """
        self.release(of)
        old = self._snapshots.get(of)
        snapshot = CachedSnapshot(fd, os.fstat(fd).st_size, digest, self_check)
        if old is not None and _is_same(old, snapshot):
            os.close(fd)
            return old
        self.drop(of)
        self._snapshots[of] = snapshot
        self._known_bytes[of] = snapshot.num_bytes
        self._uses.setdefault(of, self._last_used_at.get(of.model, 0.0))
        if self._fd_store is not None:
            self._fd_store.store(of, snapshot)
        return snapshot

    def retire(self, of: SnapshotId) -> None:
        """Remove the snapshot while its memory still counts as used."""
        snapshot = self._snapshots.pop(of)
        self._drop_from_fd_store(snapshot)
        self._leaving[of] = snapshot
        self.num_evicted += 1

    def drop_retired(self, of: SnapshotId) -> None:
        """Drop a retired snapshot after all workers have released the memory."""
        self._close(self._leaving, of)

    def drop(self, of: SnapshotId) -> None:
        """Drop the snapshot; the memory is freed when no worker maps the snapshot."""
        if (snapshot := self._snapshots.get(of)) is not None:
            self._drop_from_fd_store(snapshot)
        self._close(self._snapshots, of)

    def drop_all(self, model: str) -> None:
        """Drop the model's snapshots of all degrees."""
        for one in self.of_model(model):
            self.drop(one)

    def touch(self, model: str, at: float | None = None, degree: int | None = None) -> None:
        """Record a use of the model, now or ``at`` (wall-clock seconds).

        ``degree`` is that of the device, None if no device was used. A use now is later than all
        uses before, also after the clock has been set back: otherwise the models used since would
        be evicted first.
        """
        used_at = self._now() if at is None else at
        if at is None and used_at < self._latest_at:
            used_at = self._latest_at + _STEP_S
        self._latest_at = max(self._latest_at, used_at)
        self._last_used_at[model] = used_at
        if degree is not None:
            self._uses[SnapshotId(model, degree)] = used_at

    def last_used_at(self, model: str) -> float | None:
        """Return the time of the model's last use in wall-clock seconds, None if unknown."""
        return self._last_used_at.get(model)

    def last_use_of(self, of: SnapshotId) -> float:
        """Return the time of a snapshot's last use in wall-clock seconds.

        A snapshot that no device has used counts as used when its model was before; with one
        snapshot only, every use of the model counts.
        """
        model_at = self._last_used_at.get(of.model, 0.0)
        return self._uses.get(of, model_at) if len(self.of_model(of.model)) > 1 else model_at

    def forget(self, model: str) -> None:
        """Forget a removed model and its snapshots."""
        self.drop_all(model)
        self.pinned.discard(model)
        self._last_used_at.pop(model, None)
        for record in (self._reserved_bytes, self._known_bytes, self._uses):
            for of in [one for one in record if one.model == model]:
                del record[of]

    def close(self) -> None:
        """Close all snapshots; the fd store keeps its copies."""
        for snapshots in (self._snapshots, self._leaving):
            for of in list(snapshots):
                self._close(snapshots, of)

    def _drop_from_fd_store(self, snapshot: CachedSnapshot) -> None:
        if self._fd_store is not None:
            self._fd_store.release(snapshot)

    @staticmethod
    def _close(snapshots: dict[SnapshotId, CachedSnapshot], of: SnapshotId) -> None:
        snapshot = snapshots.pop(of, None)
        if snapshot is not None:
            os.close(snapshot.fd)


def _is_same(one: CachedSnapshot, other: CachedSnapshot) -> bool:
    is_alike = (one.digest, one.self_check) == (other.digest, other.self_check)
    return is_alike and os.path.sameopenfile(one.fd, other.fd)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[K]):
    """A snapshot of ``num_bytes``; ``last_used_at`` is wall-clock seconds.

    ``key`` names the snapshot, or its model.
    """

    key: K
    num_bytes: int
    last_used_at: float
    is_pinned: bool = False
    is_busy: bool = False


def choose_victims(candidates: Sequence[Candidate[K]], short_bytes: int) -> list[K] | None:
    """Return the snapshots to evict for ``short_bytes``, None if too few.

    Pinned and busy snapshots stay. Least recently used snapshots go first; a chosen
    snapshot stays nevertheless if the other chosen snapshots suffice.
    """
    idle = [one for one in candidates if not one.is_pinned and not one.is_busy]
    chosen: list[Candidate[K]] = []
    freed_bytes = 0
    for one in sorted(idle, key=lambda one: one.last_used_at):
        if freed_bytes >= short_bytes:
            break
        chosen.append(one)
        freed_bytes += one.num_bytes
    if freed_bytes < short_bytes:
        return None
    for one in reversed(chosen):
        if freed_bytes - one.num_bytes >= short_bytes:
            chosen = [other for other in chosen if other is not one]
            freed_bytes -= one.num_bytes
    return [one.key for one in chosen]


def start_order(candidates: Sequence[Candidate[K]], budget_bytes: int) -> list[K]:
    """Return the order in which to load all models within the budget.

    Pinned snapshots come first, then the most recently used snapshots within the budget. All other
    models need memory only while loading, and are loaded before the last snapshots that stay.
    """
    ranked = sorted(candidates, key=lambda one: (not one.is_pinned, -one.last_used_at))
    num_kept, kept_bytes = 0, 0
    for one in ranked:
        if kept_bytes + one.num_bytes > budget_bytes:
            break
        num_kept, kept_bytes = num_kept + 1, kept_bytes + one.num_bytes
    others = ranked[num_kept:]
    largest_bytes = max((one.num_bytes for one in others), default=0)
    num_first = num_kept
    while num_first and kept_bytes + largest_bytes > budget_bytes:
        num_first -= 1
        kept_bytes -= ranked[num_first].num_bytes
    order = [*ranked[:num_first], *others, *ranked[num_first:num_kept]]
    return [one.key for one in order]
