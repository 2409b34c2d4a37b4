"""Eviction of snapshots from the model cache, and waiting for free memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpupoold.config.schema import SYSTEM_CONFIG
from gpupoold.control.weights.cache import SnapshotCache
from gpupoold.control.weights.lru import Candidate, choose_victims
from gpupoold.errors import GpupoolError, Refused, TimedOut
from gpupoold.units import format_bytes

_GIB, _MIB = 1 << 30, 1 << 20
_logger = logging.getLogger(__name__)


class CacheFull(Refused):
    """Too few snapshots can be evicted for another snapshot."""


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

    A snapshot stays while pinned, while the model ``is_in_use``, or while held. ``release`` returns
    when no worker maps the snapshot.
    """

    def __init__(
        self,
        cache: SnapshotCache,
        is_in_use: Callable[[str], bool],
        release: Callable[[str], Awaitable[None]],
        setting: Callable[[], CacheSetting] = CacheSetting,
    ) -> None:
        self._cache = cache
        self._setting = setting
        self._is_in_use = is_in_use
        self._release = release
        self._holds: Counter[str] = Counter()
        # One eviction at a time, because two would evict snapshots for the same bytes.
        self._evicting = asyncio.Lock()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._change = asyncio.Event()
        self._shrinking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def holding(self, model: str) -> Iterator[None]:
        """Protect the model's snapshot inside the context; drop a reservation at the end."""
        self._holds[model] += 1
        try:
            yield
        finally:
            self._holds[model] -= 1
            if not self._holds[model]:
                del self._holds[model]
                self._cache.release(model)
                self.changed()

    def changed(self) -> None:
        """Notify waiters that a snapshot may have become evictable."""
        self._change.set()
        self._change = asyncio.Event()

    def check(self, model: str, num_bytes: int) -> int:
        """Check that a snapshot of ``num_bytes`` would fit after evictions.

        Returns the bytes that the evictions would free.

        Raises:
            CacheFull: pinned and used snapshots leave too little.
        """
        others = self._candidates(model)
        victims = choose_victims(others, self._cache.short_bytes(model, num_bytes))
        if victims is None:
            raise self._refusal(model, num_bytes)
        return sum(one.num_bytes for one in others if one.model in victims)

    async def reserve(self, model: str, num_bytes: int, wait_s: float = 0.0) -> None:
        """Reserve memory for the snapshot of a held model, evicting others.

        Raises:
            CacheFull: pinned snapshots leave too little; or used snapshots, if ``wait_s`` is 0.
            TimedOut: used snapshots left too little for ``wait_s``.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        leaving = self._leaving.get(model)
        if leaving is not None:
            await asyncio.shield(leaving)
        while True:
            change = self._change
            async with self._evicting:
                if await self._evict_for(model, num_bytes):
                    self._cache.reserve(model, num_bytes)
                    return
            left_s = deadline_s - loop.time()
            if not wait_s or not self._would_fit(model, num_bytes):
                raise self._refusal(model, num_bytes)
            if left_s <= 0:
                raise TimedOut(
                    f"{model}: no memory for a snapshot of {format_bytes(num_bytes)} became free "
                    f"in the model cache within {wait_s:g} s: all other snapshots are pinned or "
                    "in use",
                    f"unpin a model (`gpupool cache unpin`), or {self._raise_it(model, num_bytes)}",
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(change.wait(), left_s)

    async def drop(self, model: str) -> None:
        """Drop a model's snapshot if in host memory.

        Raises:
            Refused: the snapshot is pinned, in use, or loading.
        """
        async with self._evicting:
            if model in self._cache.pinned:
                raise Refused(f"{model} is pinned", f"run `gpupool cache unpin {model}` first")
            if self._is_in_use(model):
                raise Refused(f"{model} has live requests", "wait until the requests have ended")
            if self._holds[model]:
                raise Refused(f"{model} is being loaded", "wait until the load has ended")
            if self._cache.get(model) is not None:
                await self._drop_all([model])

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

    async def _evict_for(self, model: str, num_bytes: int) -> bool:
        """Evict snapshots until ``num_bytes`` fit; return False if too few can be evicted."""
        while (short_bytes := self._cache.short_bytes(model, num_bytes)) > 0:
            victims = choose_victims(self._candidates(model), short_bytes)
            if victims is None:
                return False
            _logger.info("%s: the snapshot replaces the snapshots of %s", model, victims)
            await self._drop_all(victims)
        return True

    async def _shrink(self) -> None:
        while True:
            change = self._change
            async with self._evicting:
                short_bytes = self._cache.short_bytes("", 0)
                if not short_bytes:
                    return
                others = self._candidates("")
                idle_bytes = sum(
                    one.num_bytes for one in others if not (one.is_pinned or one.is_busy)
                )
                victims = choose_victims(others, min(short_bytes, idle_bytes))
                if victims:
                    _logger.info(
                        "the model cache has become smaller: the snapshots of %s are evicted",
                        victims,
                    )
                    await self._drop_all(victims)
                    continue
            await change.wait()

    async def _drop_all(self, models: list[str]) -> None:
        for model in models:
            # The model has no snapshot from now on, even if the caller is cancelled.
            self._cache.retire(model)
            self._leaving[model] = asyncio.create_task(self._leave(model))
        await asyncio.shield(asyncio.gather(*(self._leaving[model] for model in models)))

    async def _leave(self, model: str) -> None:
        try:
            await self._release(model)
        except GpupoolError as error:
            _logger.error("%s: the snapshot may still take memory: %s", model, error)
        finally:
            self._cache.drop_retired(model)
            del self._leaving[model]
            self.changed()

    def _candidates(self, model: str) -> list[Candidate]:
        return [
            Candidate(
                name,
                snapshot.num_bytes,
                self._cache.last_used_at(name) or 0.0,
                name in self._cache.pinned,
                self._holds[name] > 0 or self._is_in_use(name),
            )
            for name, snapshot in self._cache.snapshots.items()
            if name != model
        ]

    def _would_fit(self, model: str, num_bytes: int) -> bool:
        """Return whether the snapshot would fit after evicting all other unpinned snapshots."""
        return num_bytes <= self._cache.budget_bytes - self._bytes_of(model, pinned=True)

    def _bytes_of(self, model: str, *, pinned: bool) -> int:
        """Return the bytes of other models' pinned snapshots, or of busy unpinned snapshots."""
        others = self._candidates(model)
        if pinned:
            return sum(one.num_bytes for one in others if one.is_pinned)
        return sum(one.num_bytes for one in others if one.is_busy and not one.is_pinned)

    def _refusal(self, model: str, num_bytes: int) -> CacheFull:
        pinned_bytes = self._bytes_of(model, pinned=True)
        text = (
            f"{model}: a snapshot of {format_bytes(num_bytes)} does not fit in the model cache "
            f"of {format_bytes(self._cache.budget_bytes)}"
        )
        if why := self._setting().why:
            text += f" ({why})"
        if pinned_bytes:
            text += f", where {format_bytes(pinned_bytes)} are pinned"
        if self._would_fit(model, num_bytes):
            busy = format_bytes(self._bytes_of(model, pinned=False))
            text += f"{' and' if pinned_bytes else ', where'} {busy} in use"
            remedy = self._raise_it(model, num_bytes)
            return CacheFull(text, f"try again when fewer snapshots are in use, or {remedy}")
        unpin = "unpin a model (`gpupool cache unpin`), or " if pinned_bytes else ""
        return CacheFull(text, f"{unpin}{self._raise_it(model, num_bytes)}")

    def _raise_it(self, model: str, num_bytes: int) -> str:
        """Return how to make the cache large enough for a snapshot beside the pinned snapshots."""
        needed_bytes = num_bytes + self._bytes_of(model, pinned=True)
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
