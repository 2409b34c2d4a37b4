"""Saved snapshots: looked up before a load, written after a load."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from gpupoold.control.weights.cache import CachedSnapshot, SnapshotId
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
        self._saving: dict[SnapshotId, asyncio.Task[None]] = {}
        self._shrinking: set[asyncio.Task[None]] = set()

    async def look_up(self, model: ModelToLoad, ready: WorkerReady, degree: int = 1) -> int | None:
        """Return the bytes of the model's saved snapshot for such a worker of ``degree`` GPUs, None
        without one.

        ``read`` and ``keep`` then refer to this snapshot.
        """
        if await self._keys.note(model, ready, degree) is None:
            return None
        return (await self.sizes()).get(SnapshotId(model.name, degree))

    async def read(self, of: SnapshotId) -> SavedSnapshot | None:
        """Return a saved snapshot, or None; the caller owns the descriptor.

        ``look_up`` must have been called before.
        """
        key = self._keys.get(of)
        if key is None or not self.budget_bytes:
            return None
        reading = asyncio.ensure_future(asyncio.to_thread(self._files.load, key))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            reading.add_done_callback(_close)  # nobody takes the memory
            raise

    async def sizes(self) -> dict[SnapshotId, int]:
        """Return the bytes of saved snapshots that were passed to ``look_up`` before."""
        if not self.budget_bytes:
            return {}
        found = {file.key: file.num_bytes for file in await asyncio.to_thread(self._files.list)}
        return {of: found[key] for of, key in self._keys.all().items() if key in found}

    async def used_bytes(self) -> int:
        """Bytes of all snapshots in the folder."""
        if not self.budget_bytes:
            return 0
        return sum(file.num_bytes for file in await asyncio.to_thread(self._files.list))

    def is_known(self, of: SnapshotId) -> bool:
        """Return whether ``look_up`` has found the key of a snapshot."""
        return self._keys.get(of) is not None

    def key(self, of: SnapshotId) -> str | None:
        """Return the key of a snapshot, None before ``look_up``."""
        return self._keys.get(of)

    def keep(self, of: SnapshotId, snapshot: CachedSnapshot) -> None:
        """Save a snapshot in the background; ``look_up`` must have been called before."""
        key = self._keys.get(of)
        if key is None or not self.budget_bytes:
            return
        try:
            copy = _copy(snapshot)
        except OSError as error:
            _logger.warning("%s: the snapshot could not be saved: %s", of, error)
            return
        before = self._saving.get(of)
        task = asyncio.create_task(self._save_after(before, of, key, copy))
        self._saving[of] = task
        task.add_done_callback(lambda done: self._saved(of, done))

    async def settled(self, of: SnapshotId) -> None:
        """Return after the end of a save in progress, which needs the memory of the snapshot."""
        if of in self._saving:
            await asyncio.wait({self._saving[of]})

    async def forget(self, model: str) -> None:
        """Delete a removed model's files of all degrees, unless another model has the same key.

        Saves in progress end before, because each would bring a file back.
        """
        for of in [one for one in self._saving if one.model == model]:
            await self.settled(of)
        forgotten = self._keys.forget(model)
        if self.budget_bytes:
            for key in forgotten.difference(self._keys.all().values()):
                self._files.drop(key)

    async def tidy(self, wanted: Iterable[SnapshotId]) -> None:
        """Delete files that belong to no model, for example of changed checkpoints.

        Has no effect before all ``wanted`` snapshots have been looked up.
        """
        keys = self._keys.all()
        if self.budget_bytes and all(of in keys for of in wanted):
            await asyncio.to_thread(self._files.remove_others, lambda: self._keys.all().values())

    def shrink(self, last_use_of: Callable[[SnapshotId], float]) -> None:
        """Delete files beyond a smaller budget in the background.

        Files of unknown models go first, then the least recently used.
        """
        used_at = {key: last_use_of(of) for of, key in self._keys.all().items()}
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

    def _saved(self, of: SnapshotId, task: asyncio.Task[None]) -> None:
        if self._saving.get(of) is task:
            del self._saving[of]

    async def _save_after(
        self, before: asyncio.Task[None] | None, of: SnapshotId, key: str, snapshot: CachedSnapshot
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        await asyncio.to_thread(self._save, of, key, snapshot)

    def _save(self, of: SnapshotId, key: str, snapshot: CachedSnapshot) -> None:
        try:
            others = [file for file in self._files.list() if file.key != key]
            used_bytes = sum(file.num_bytes for file in others)
            if used_bytes + snapshot.num_bytes > self.budget_bytes:
                _logger.warning(
                    "%s: a snapshot of %s is not saved: %s of %s are used (memory.snapshot_files)",
                    of,
                    format_bytes(snapshot.num_bytes),
                    format_bytes(used_bytes),
                    format_bytes(self.budget_bytes),
                )
                return
            self._files.save(key, snapshot.fd, snapshot.digest, snapshot.self_check)
        except (GpupoolError, OSError) as error:
            _logger.warning("%s: the snapshot could not be saved: %s", of, error)
        finally:
            os.close(snapshot.fd)


def _copy(snapshot: CachedSnapshot) -> CachedSnapshot:
    """Return a copy with its own descriptor, because the cache may drop the snapshot meanwhile."""
    return CachedSnapshot(
        os.dup(snapshot.fd), snapshot.num_bytes, snapshot.digest, snapshot.self_check
    )


def _close(reading: asyncio.Future[SavedSnapshot | None]) -> None:
    if not reading.cancelled() and (saved := reading.result()) is not None:
        os.close(saved.fd)
