"""Eviction of snapshots from the model cache, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from gpupoold.config.schema import SYSTEM_CONFIG
from gpupoold.control.weights.cache import Candidate, SnapshotCache, SnapshotId, choose_victims
from gpupoold.errors import GpupoolError, Refused, TimedOut
from gpupoold.units import format_bytes

_GIB, _MIB = 1 << 30, 1 << 20
_logger = logging.getLogger(__name__)


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
            for one in held:
                self._holds[one] -= 1
                if not self._holds[one]:
                    del self._holds[one]
                    self._cache.release(one)
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

        Returns the bytes that the evictions would free.

        Raises:
            CacheFull: pinned and used snapshots leave too little.
        """
        others = self._candidates(of)
        victims = choose_victims(others, self._cache.short_bytes(of, num_bytes))
        if victims is None:
            raise self.why_full(of, num_bytes)
        return sum(one.num_bytes for one in others if one.key in victims)

    async def reserve(self, of: SnapshotId, num_bytes: int) -> None:
        """Reserve memory for a held snapshot, evicting others.

        Raises:
            CacheFull: pinned and used snapshots leave too little.
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

        Raises:
            Refused: a snapshot is pinned, in use, or loading; all stay.
        """
        async with self._evicting:
            present = self._cache.of_model(model)
            if model in self._cache.pinned:
                raise Refused(f"{model} is pinned", f"run `gpupool cache unpin {model}` first")
            if any(self._is_in_use(one) for one in present):
                raise Refused(f"{model} has live requests", "wait until the requests have ended")
            if any(one.model == model for one in self._holds):
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
                idle_bytes = sum(
                    one.num_bytes for one in others if not (one.is_pinned or one.is_busy)
                )
                victims = choose_victims(others, min(short_bytes, idle_bytes))
                if victims:
                    _logger.info(
                        "the model cache has become smaller: the snapshots of %s are evicted",
                        ", ".join(map(str, victims)),
                    )
                    await self._drop_all(victims)
                    continue
            await change.wait()

    async def _drop_all(self, victims: list[SnapshotId]) -> None:
        for one in victims:
            # There is no such snapshot from now on, even if the caller is cancelled.
            self._cache.retire(one)
        for one in victims:
            self._leaving[one] = asyncio.create_task(self._leave(one, self._release(one)))
        await asyncio.shield(asyncio.gather(*(self._leaving[one] for one in victims)))

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
            return sum(one.num_bytes for one in others if one.is_pinned)
        return sum(one.num_bytes for one in others if one.is_busy and not one.is_pinned)

    def why_full(self, of: SnapshotId, num_bytes: int, waited_s: float = 0.0) -> GpupoolError:
        """Return the error for a snapshot without space, perhaps after a wait."""
        if waited_s and self._would_fit(of, num_bytes):
            return TimedOut(
                f"{of}: no memory for a snapshot of {format_bytes(num_bytes)} became free "
                f"in the model cache within {waited_s:g} s: all other snapshots are pinned or "
                "in use",
                f"unpin a model (`gpupool cache unpin`), or {self._raise_it(of, num_bytes)}",
            )
        return self._refusal(of, num_bytes)

    def _refusal(self, of: SnapshotId, num_bytes: int) -> CacheFull:
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
