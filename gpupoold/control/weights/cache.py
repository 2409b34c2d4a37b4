"""The model cache: weights snapshots in shared host memory, their evictions, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from gpupoold.config.schema import SYSTEM_CONFIG
from gpupoold.errors import GpupoolError, Refused, TimedOut
from gpupoold.memory.libc import NO_NODE, nodes_of
from gpupoold.units import format_bytes

_STEP_S = 1e-3  # between two uses while the clock is behind the latest use

K = TypeVar("K")

_GIB, _MIB = 1 << 30, 1 << 20
_logger = logging.getLogger(__name__)


class SnapshotId(NamedTuple):
    """A model's snapshot for devices of ``degree`` GPUs, with a part for each GPU."""

    model: str
    degree: int = 1

    def __str__(self) -> str:
        return f"{self.model} (groups of {self.degree})" if self.degree > 1 else self.model


@dataclass(frozen=True, slots=True)
class CachedSnapshot:
    """A snapshot: the daemon's memfd descriptor, and the digest of the layout.

    ``self_check`` has the tokens that the model answers to its self-check, ``nodes`` the NUMA node
    of the part of each GPU.
    """

    fd: int
    num_bytes: int
    digest: str
    self_check: tuple[int, ...] = ()
    nodes: tuple[int, ...] = field(default=(), compare=False)

    def is_far_from(self, nodes: Sequence[int]) -> bool:
        """Return whether a GPU on one of ``nodes`` copies its part from another node."""
        parts = zip(self.nodes, nodes, strict=False)
        return any(part != node for part, node in parts if NO_NODE not in (part, node))


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
        reserved = self._reserved_bytes.values()
        return sum(snapshot.num_bytes for snapshot in snapshots) + sum(reserved)

    @property
    def snapshots(self) -> dict[SnapshotId, CachedSnapshot]:
        """The snapshots, without reserved and retired snapshots."""
        return dict(self._snapshots)

    def get(self, of: SnapshotId) -> CachedSnapshot | None:
        """Return a snapshot if in host memory."""
        return self._snapshots.get(of)

    def of_model(self, model: str) -> list[SnapshotId]:
        """Return the model's snapshots in host memory."""
        return [snapshot for snapshot in self._snapshots if snapshot.model == model]

    def num_bytes(self, model: str) -> int:
        """Return the bytes of the model's snapshots in host memory."""
        return sum(self._snapshots[snapshot_id].num_bytes for snapshot_id in self.of_model(model))

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
        num_bytes = os.fstat(fd).st_size
        nodes = nodes_of(fd, num_bytes, of.degree)
        snapshot = CachedSnapshot(fd, num_bytes, digest, self_check, nodes)
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
        for snapshot_id in self.of_model(model):
            self.drop(snapshot_id)

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
            for of in [snapshot_id for snapshot_id in record if snapshot_id.model == model]:
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


def _is_same(snapshot: CachedSnapshot, other: CachedSnapshot) -> bool:
    is_alike = (snapshot.digest, snapshot.self_check) == (other.digest, other.self_check)
    return is_alike and os.path.sameopenfile(snapshot.fd, other.fd)


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
    idle = [each for each in candidates if not (each.is_pinned or each.is_busy)]
    chosen: list[Candidate[K]] = []
    freed_bytes = 0
    for candidate in sorted(idle, key=lambda candidate: candidate.last_used_at):
        if freed_bytes >= short_bytes:
            break
        chosen.append(candidate)
        freed_bytes += candidate.num_bytes
    if freed_bytes < short_bytes:
        return None
    for candidate in reversed(chosen):
        if freed_bytes - candidate.num_bytes >= short_bytes:
            chosen = [other for other in chosen if other is not candidate]
            freed_bytes -= candidate.num_bytes
    return [candidate.key for candidate in chosen]


def start_order(candidates: Sequence[Candidate[K]], budget_bytes: int) -> list[K]:
    """Return the order in which to load all models within the budget.

    Pinned snapshots come first, then the most recently used that fit. All other models need memory
    only while loading, and are loaded before the last snapshots that stay.
    """
    ranked = sorted(candidates, key=lambda each: (not each.is_pinned, -each.last_used_at))
    num_kept, kept_bytes = 0, 0
    for candidate in ranked:
        if kept_bytes + candidate.num_bytes > budget_bytes:
            break
        num_kept, kept_bytes = num_kept + 1, kept_bytes + candidate.num_bytes
    others = ranked[num_kept:]
    largest_bytes = max((other.num_bytes for other in others), default=0)
    num_first = num_kept
    while num_first and kept_bytes + largest_bytes > budget_bytes:
        num_first -= 1
        kept_bytes -= ranked[num_first].num_bytes
    order = [*ranked[:num_first], *others, *ranked[num_first:num_kept]]
    return [candidate.key for candidate in order]


class CacheFull(Refused):
    """Too few snapshots can be evicted for another snapshot."""


class Space(Enum):
    """Whether a snapshot has space in the cache."""

    FITS = auto()
    EVICTS = auto()  # fits when idle snapshots are evicted
    LATER = auto()  # too many snapshots are in use now
    NEVER = auto()  # pinned snapshots leave too little


@dataclass(frozen=True, slots=True)
class CacheSetting:
    """The origin of the model cache's size, for messages.

    ``file`` is the configuration, ``why`` the arithmetic of a size that was worked out, and
    ``most_bytes`` the largest size that a reload of the configuration accepts, None for no limit.
    """

    file: Path | None = None
    why: str = ""
    most_bytes: int | None = None


class HostMemoryBudget:
    """Frees memory in ``cache``, least recently used snapshots first.

    A snapshot stays while its model is pinned, while the snapshot ``is_in_use``, or while held.
    ``release`` takes a snapshot out of use at once, and returns an awaitable of the moment when no
    worker maps the snapshot. ``change`` is set, and replaced, when a snapshot may have become
    evictable.
    """

    def __init__(
        self,
        cache: SnapshotCache,
        is_in_use: Callable[[SnapshotId], bool],
        release: Callable[[SnapshotId], Awaitable[None]],
        setting: Callable[[], CacheSetting] = CacheSetting,
    ) -> None:
        self._cache = cache
        self._setting = setting
        self._is_in_use = is_in_use
        self._release = release
        self._holds: Counter[SnapshotId] = Counter()
        # One eviction at a time, because two would evict snapshots for the same bytes.
        self._evicting = asyncio.Lock()
        self._leaving: dict[SnapshotId, asyncio.Task[None]] = {}
        self.change = asyncio.Event()
        self._shrinking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def holding(self, *held: SnapshotId) -> Iterator[None]:
        """Protect snapshots inside the context; drop reservations at the end."""
        self._holds.update(held)
        try:
            yield
        finally:
            for snapshot_id in held:
                self._holds[snapshot_id] -= 1
                if not self._holds[snapshot_id]:
                    del self._holds[snapshot_id]
                    self._cache.release(snapshot_id)
            self.changed()

    def changed(self) -> None:
        """Record that a snapshot may have become evictable."""
        self.change.set()
        self.change = asyncio.Event()

    def space(self, of: SnapshotId, num_bytes: int) -> Space:
        """Return whether a snapshot of ``num_bytes`` fits."""
        short_bytes = self._cache.short_bytes(of, num_bytes)
        if not short_bytes:
            return Space.FITS
        if choose_victims(self._candidates(of), short_bytes) is not None:
            return Space.EVICTS
        return Space.LATER if self._would_fit(of, num_bytes) else Space.NEVER

    def check(self, of: SnapshotId, num_bytes: int) -> int:
        """Check that a snapshot of ``num_bytes`` would fit after evictions.

        Returns the bytes that the evictions would free. Raises CacheFull: pinned and used snapshots
        leave too little.
        """
        others = self._candidates(of)
        victims = choose_victims(others, self._cache.short_bytes(of, num_bytes))
        if victims is None:
            raise self.why_full(of, num_bytes)
        return sum(other.num_bytes for other in others if other.key in victims)

    async def reserve(self, of: SnapshotId, num_bytes: int) -> None:
        """Reserve memory for a held snapshot, evicting others.

        Raises CacheFull: pinned and used snapshots leave too little.
        """
        leaving = self._leaving.get(of)
        if leaving is not None:
            await asyncio.shield(leaving)
        async with self._evicting:
            if not await self._evict_for(of, num_bytes):
                raise self.why_full(of, num_bytes)
            self._cache.reserve(of, num_bytes)

    async def drop(self, model: str) -> None:
        """Drop a model's snapshots of all degrees that are in host memory.

        Raises Refused: a snapshot is pinned, in use, or loading; all stay.
        """
        async with self._evicting:
            present = self._cache.of_model(model)
            if model in self._cache.pinned:
                raise Refused(f"{model} is pinned", f"run `gpupool cache unpin {model}` first")
            if any(self._is_in_use(snapshot_id) for snapshot_id in present):
                raise Refused(f"{model} has live requests", "wait until the requests have ended")
            if any(hold.model == model for hold in self._holds):
                raise Refused(f"{model} is being loaded", "wait until the load has ended")
            await self._drop_all(present)

    def shrink(self) -> None:
        """Evict snapshots beyond a smaller budget: idle snapshots now, busy snapshots later."""
        if self._shrinking is None or self._shrinking.done():
            self._shrinking = asyncio.create_task(self._shrink(), name="shrink-cache")

    async def stop(self) -> None:
        """Wait for evictions in progress; the workers have stopped before."""
        if self._shrinking is not None:
            self._shrinking.cancel()
            await asyncio.wait({self._shrinking})
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)

    async def _evict_for(self, of: SnapshotId, num_bytes: int) -> bool:
        """Evict snapshots until ``num_bytes`` fit; return False if too few can be evicted."""
        while (short_bytes := self._cache.short_bytes(of, num_bytes)) > 0:
            victims = choose_victims(self._candidates(of), short_bytes)
            if victims is None:
                return False
            names = ", ".join(map(str, victims))
            _logger.info("%s: the snapshot replaces the snapshots of %s", of, names)
            await self._drop_all(victims)
        return True

    async def _shrink(self) -> None:
        while True:
            change = self.change
            async with self._evicting:
                short_bytes = self._cache.short_bytes(None, 0)
                if not short_bytes:
                    return
                others = self._candidates(None)
                idle = [each for each in others if not (each.is_pinned or each.is_busy)]
                idle_bytes = sum(each.num_bytes for each in idle)
                victims = choose_victims(others, min(short_bytes, idle_bytes))
                if victims:
                    text = "the model cache has become smaller: the snapshots of %s are evicted"
                    _logger.info(text, ", ".join(map(str, victims)))
                    await self._drop_all(victims)
                    continue
            await change.wait()

    async def _drop_all(self, victims: list[SnapshotId]) -> None:
        for victim in victims:
            # There is no such snapshot from now on, even if the caller is cancelled.
            self._cache.retire(victim)
        for victim in victims:
            self._leaving[victim] = asyncio.create_task(self._leave(victim, self._release(victim)))
        await asyncio.shield(asyncio.gather(*(self._leaving[victim] for victim in victims)))

    async def _leave(self, of: SnapshotId, released: Awaitable[None]) -> None:
        try:
            await released
        except GpupoolError as error:
            _logger.error("%s: the snapshot may still take memory: %s", of, error)
        finally:
            self._cache.drop_retired(of)
            del self._leaving[of]
            self.changed()

    def _candidates(self, of: SnapshotId | None) -> list[Candidate[SnapshotId]]:
        return [
            Candidate(
                other,
                snapshot.num_bytes,
                self._cache.last_use_of(other),
                other.model in self._cache.pinned,
                self._holds[other] > 0 or self._is_in_use(other),
            )
            for other, snapshot in self._cache.snapshots.items()
            if other != of
        ]

    def _would_fit(self, of: SnapshotId, num_bytes: int) -> bool:
        """Return whether the snapshot would fit after evicting all other unpinned snapshots."""
        return num_bytes <= self._cache.budget_bytes - self._bytes_of(of, pinned=True)

    def _bytes_of(self, of: SnapshotId, *, pinned: bool) -> int:
        """Return the bytes of other pinned snapshots, or of busy unpinned snapshots."""
        others = self._candidates(of)
        if pinned:
            return sum(other.num_bytes for other in others if other.is_pinned)
        return sum(other.num_bytes for other in others if other.is_busy and not other.is_pinned)

    def why_full(self, of: SnapshotId, num_bytes: int, waited_s: float = 0.0) -> GpupoolError:
        """Return the error for a snapshot without space, perhaps after a wait."""
        if waited_s and self._would_fit(of, num_bytes):
            return TimedOut(
                f"{of}: no memory for a snapshot of {format_bytes(num_bytes)} became free "
                f"in the model cache within {waited_s:g} s: all other snapshots are pinned or "
                "in use",
                f"unpin a model (`gpupool cache unpin`), or {self._raise_it(of, num_bytes)}",
            )
        pinned_bytes = self._bytes_of(of, pinned=True)
        text = (
            f"{of}: a snapshot of {format_bytes(num_bytes)} does not fit in the model cache "
            f"of {format_bytes(self._cache.budget_bytes)}"
        )
        if why := self._setting().why:
            text += f" ({why})"
        if pinned_bytes:
            text += f", where {format_bytes(pinned_bytes)} are pinned"
        if self._would_fit(of, num_bytes):
            busy = format_bytes(self._bytes_of(of, pinned=False))
            text += f"{' and' if pinned_bytes else ', where'} {busy} in use"
            remedy = self._raise_it(of, num_bytes)
            return CacheFull(text, f"try again when fewer snapshots are in use, or {remedy}")
        unpin = "unpin a model (`gpupool cache unpin`), or " if pinned_bytes else ""
        return CacheFull(text, f"{unpin}{self._raise_it(of, num_bytes)}")

    def _raise_it(self, of: SnapshotId, num_bytes: int) -> str:
        """Return how to make the cache large enough for a snapshot beside the pinned snapshots."""
        needed_bytes = num_bytes + self._bytes_of(of, pinned=True)
        setting = self._setting()
        if setting.most_bytes is not None and needed_bytes > setting.most_bytes:
            return (
                "use a smaller dtype or a quantised version: beside the other budgets "
                f"memory.model_cache can have {format_bytes(setting.most_bytes)} at most"
            )
        unit, name = (_GIB, "GiB") if needed_bytes > _GIB else (_MIB, "MiB")
        return (
            f"set memory.model_cache to {-(-needed_bytes // unit)}{name} or more in "
            f"{setting.file or SYSTEM_CONFIG}, then run `gpupool reload`"
        )
