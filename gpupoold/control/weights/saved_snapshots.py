"""Saved snapshots: looked up before a load, written after a load."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from gpupoold.control.weights.cache import CachedSnapshot
from gpupoold.control.weights.keys import SnapshotKeys
from gpupoold.control.weights.snapshot_files import SavedSnapshot, SnapshotFiles
from gpupoold.errors import GpupoolError
from gpupoold.units import format_bytes
from gpupoold.wire.messages import ModelToLoad, WorkerReady

_logger = logging.getLogger(__name__)


class SavedSnapshots:
    """The registered models' snapshots in a folder, within a byte budget; no snapshots at 0 bytes.

    Snapshots are saved in the background; a failure never fails a load. After a decrease of
    ``budget_bytes``, call ``shrink``.
    """

    def __init__(self, folder: Path, budget_bytes: int, keys: SnapshotKeys) -> None:
        self.budget_bytes = budget_bytes
        self._files = SnapshotFiles(folder)
        self._keys = keys
        self._saving: dict[str, asyncio.Task[None]] = {}
        self._shrinking: set[asyncio.Task[None]] = set()

    async def look_up(self, model: ModelToLoad, ready: WorkerReady) -> int | None:
        """Return the bytes of the model's saved snapshot for such a worker, None without one.

        ``read`` and ``keep`` then refer to this snapshot.
        """
        if await self._keys.note(model, ready) is None:
            return None
        return (await self.sizes()).get(model.name)

    async def read(self, name: str) -> SavedSnapshot | None:
        """Return the saved snapshot of a model, or None; the caller owns the descriptor.

        ``look_up`` must have been called before.
        """
        key = self._keys.get(name)
        if key is None or not self.budget_bytes:
            return None
        return await asyncio.to_thread(self._files.load, key)

    async def sizes(self) -> dict[str, int]:
        """Return the bytes of saved snapshots by model, for models passed to ``look_up`` before."""
        if not self.budget_bytes:
            return {}
        found = {file.key: file.num_bytes for file in await asyncio.to_thread(self._files.list)}
        return {name: found[key] for name, key in self._keys.all().items() if key in found}

    async def used_bytes(self) -> int:
        """Bytes of all snapshots in the folder."""
        if not self.budget_bytes:
            return 0
        return sum(file.num_bytes for file in await asyncio.to_thread(self._files.list))

    def keep(self, name: str, snapshot: CachedSnapshot) -> None:
        """Save a model's snapshot in the background; ``look_up`` must have been called before."""
        key = self._keys.get(name)
        if key is None or not self.budget_bytes:
            return
        try:
            copy = _copy(snapshot)
        except OSError as error:
            _logger.warning("%s: the snapshot could not be saved: %s", name, error)
            return
        before = self._saving.get(name)
        task = asyncio.create_task(self._save_after(before, name, key, copy))
        self._saving[name] = task
        task.add_done_callback(lambda done: self._saved(name, done))

    async def settled(self, name: str) -> None:
        """Return after the end of a save in progress, which needs the memory of the snapshot."""
        if name in self._saving:
            await asyncio.wait({self._saving[name]})

    def forget(self, name: str) -> None:
        """Delete a removed model's file, unless another model has the same key."""
        key = self._keys.get(name)
        self._keys.forget(name)
        if self.budget_bytes and key is not None and key not in self._keys.all().values():
            self._files.drop(key)

    async def tidy(self, names: list[str]) -> None:
        """Delete files that belong to no model, for example of changed checkpoints.

        Has no effect before all models have been looked up.
        """
        keys = self._keys.all()
        if self.budget_bytes and all(name in keys for name in names):
            await asyncio.to_thread(self._files.remove_others, set(keys.values()))

    def shrink(self, last_used_at: Callable[[str], float | None]) -> None:
        """Delete files beyond a smaller budget in the background.

        Files of unknown models go first, then the least recently used.
        """
        used_at = {key: last_used_at(name) or 0.0 for name, key in self._keys.all().items()}
        task = asyncio.create_task(asyncio.to_thread(self._fit, used_at), name="shrink-snapshots")
        self._shrinking.add(task)
        task.add_done_callback(self._shrinking.discard)

    def _fit(self, used_at: Mapping[str, float]) -> None:
        files = self._files.list()
        left_bytes = sum(file.num_bytes for file in files)
        for file in sorted(files, key=lambda one: (used_at.get(one.key, -1.0), one.saved_at)):
            if left_bytes <= self.budget_bytes:
                return
            self._files.drop(file.key)
            left_bytes -= file.num_bytes

    async def stop(self) -> None:
        """Wait for saves and deletions in progress."""
        waits = [*self._saving.values(), *self._shrinking]
        await asyncio.gather(*waits, return_exceptions=True)

    def _saved(self, name: str, task: asyncio.Task[None]) -> None:
        if self._saving.get(name) is task:
            del self._saving[name]

    async def _save_after(
        self, before: asyncio.Task[None] | None, name: str, key: str, snapshot: CachedSnapshot
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        await asyncio.to_thread(self._save, name, key, snapshot)

    def _save(self, name: str, key: str, snapshot: CachedSnapshot) -> None:
        try:
            others = [file for file in self._files.list() if file.key != key]
            used_bytes = sum(file.num_bytes for file in others)
            if used_bytes + snapshot.num_bytes > self.budget_bytes:
                _logger.warning(
                    "%s: a snapshot of %s is not saved: %s of %s are used (memory.snapshot_files)",
                    name,
                    format_bytes(snapshot.num_bytes),
                    format_bytes(used_bytes),
                    format_bytes(self.budget_bytes),
                )
                return
            self._files.save(key, snapshot.fd, snapshot.digest, snapshot.self_check)
        except (GpupoolError, OSError) as error:
            _logger.warning("%s: the snapshot could not be saved: %s", name, error)
        finally:
            os.close(snapshot.fd)


def _copy(snapshot: CachedSnapshot) -> CachedSnapshot:
    """Return a copy with its own descriptor, because the cache may drop the snapshot meanwhile."""
    return CachedSnapshot(
        os.dup(snapshot.fd), snapshot.num_bytes, snapshot.digest, snapshot.self_check
    )
