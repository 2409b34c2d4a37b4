"""Snapshots that outlive a worker or the daemon: their keys, files and stored descriptors."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from blake3 import blake3

from gpupoold.control.weights.cache import CachedSnapshot, SnapshotCache, SnapshotId
from gpupoold.control.weights.snapshot_files import FORMAT, SavedSnapshot, SnapshotFiles
from gpupoold.engine_options.names import engine_part, without_adapter_support
from gpupoold.errors import Failed, GpupoolError
from gpupoold.system.systemd import FdStore
from gpupoold.units import format_bytes
from gpupoold.wire.messages import ModelToLoad, WorkerReady

_logger = logging.getLogger(__name__)

# Names, targets, and the hosts and limits of media do not change a model's weights, nor do slots of
# adapters.
_IN_SNAPSHOT = ("allow_remote_code", "dtype", "engine", "max_model_len", "path")

PREFIX = "snapshot-"
_FIXED_SIZE = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
_FIXED = _FIXED_SIZE | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_FORMAT = 1
_MAX_LABEL_BYTES = 1 << 16


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

    async def read(self, of: SnapshotId, nodes: Sequence[int]) -> SavedSnapshot | None:
        """Return a saved snapshot, or None; the caller owns the descriptor.

        The part of each GPU gets memory of one of the NUMA ``nodes``. ``look_up`` must have been
        called before.
        """
        key = self._keys.get(of)
        if key is None or not self.budget_bytes:
            return None
        reading = asyncio.ensure_future(asyncio.to_thread(self._files.load, key, nodes))
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
        if not self.budget_bytes:
            return 0
        return sum(file.num_bytes for file in await asyncio.to_thread(self._files.list))

    def key(self, of: SnapshotId) -> str | None:
        """Return the key of a snapshot, None before ``look_up``."""
        return self._keys.get(of)

    def keep(self, of: SnapshotId, snapshot: CachedSnapshot) -> None:
        """Save a snapshot in the background; ``look_up`` must have been called before."""
        key = self._keys.get(of)
        if key is None or not self.budget_bytes:
            return
        try:  # the cache may drop the snapshot meanwhile
            copy = replace(snapshot, fd=os.dup(snapshot.fd))
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
        for of in [snapshot_id for snapshot_id in self._saving if snapshot_id.model == model]:
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
        for file in sorted(files, key=lambda file: (used_at.get(file.key, -1.0), file.saved_at)):
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


def _close(reading: asyncio.Future[SavedSnapshot | None]) -> None:
    if not reading.cancelled() and (saved := reading.result()) is not None:
        os.close(saved.fd)


def snapshot_key(model: ModelToLoad, engine_version: str, device_name: str, page_bytes: int) -> str:
    """Return a hex digest of all inputs of the model's snapshot.

    The name of a group's device begins with the number of its GPUs. A checkpoint counts by paths,
    sizes and modification times of its files, without hidden files. To be called before the engine
    reads the files, because a later change would go unnoticed. Raises Failed: the checkpoint's
    folder cannot be read.
    """
    try:
        files = sorted(_checkpoint_files(model.path))
    except OSError as error:
        raise Failed(
            f"{model.name}: cannot read the checkpoint {model.path}: {error}",
            "repair the folder or add the model again",
        ) from error
    what = (FORMAT, engine_version, device_name, page_bytes, _decisive(model), files)
    return blake3(msgspec.json.encode(what)).hexdigest()


def kv_identity(model: ModelToLoad, snapshot_key: str | None) -> str:
    """Return a digest of all that decides on a model's KV, empty without the snapshot's key.

    The key says which files the snapshot was made of, and with which options; the present options
    may be others.
    """
    if snapshot_key is None:
        return ""
    return blake3(msgspec.json.encode((snapshot_key, _decisive(model)))).hexdigest()


class SnapshotKeys:
    """The keys of snapshots as of the latest examination of each checkpoint."""

    def __init__(self) -> None:
        self._keys: dict[SnapshotId, str] = {}

    async def note(self, model: ModelToLoad, ready: WorkerReady, degree: int = 1) -> str | None:
        """Examine a model's checkpoint; return the key for such a worker of ``degree`` GPUs.

        Returns None, with a line in the log, if the folder cannot be read.
        """
        of = SnapshotId(model.name, degree)
        try:
            key = await asyncio.to_thread(
                snapshot_key, model, ready.engine_version, ready.device_name, ready.facts.page_bytes
            )
        except GpupoolError as error:
            _logger.warning("%s", error)
            self._keys.pop(of, None)
            return None
        self._keys[of] = key
        return key

    def get(self, of: SnapshotId) -> str | None:
        """Return a snapshot's key, None if the checkpoint was not examined."""
        return self._keys.get(of)

    def all(self) -> dict[SnapshotId, str]:
        return dict(self._keys)

    def forget(self, model: str) -> set[str]:
        """Forget a model after a removal, or before new snapshots; return its keys."""
        forgotten = [of for of in self._keys if of.model == model]
        return {self._keys.pop(of) for of in forgotten}


def _decisive(model: ModelToLoad) -> list[tuple[str, object]]:
    engine = without_adapter_support(engine_part(model.engine))
    fields = vars(model) | {"engine": sorted(engine.items())}
    return [(name, fields[name]) for name in _IN_SNAPSHOT]


def _checkpoint_files(folder: str) -> Iterator[tuple[bytes, int, int]]:
    """Yield relative path, bytes and mtime in ns of each file; links to folders may loop."""
    seen = set()
    for parent, folders, names in os.walk(folder, onerror=_reraise, followlinks=True):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith("."):
                path = os.path.join(parent, name)
                status = os.stat(path)
                relative = os.fsencode(os.path.relpath(path, folder))
                yield relative, status.st_size, status.st_mtime_ns


def _reraise(error: OSError) -> None:
    raise error


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot's description: model, degree, key, and the fields of ``CachedSnapshot``.

    Each stored snapshot has two memfds under one name (``snapshot-`` and 16 random digits): the
    data, and a small sealed label. A new daemon gets both back and uses the snapshot if

    - both memfds have sealed sizes, and the data has the size in the label;
    - the label names a registered model whose checkpoint and engine still have the same key for the
      workers of the label's degree;
    - the snapshot fits in ``memory.model_cache``.

    The bytes are not compared: no process writes to a finished snapshot, and a model loaded from a
    snapshot must pass its self-check, else the checkpoint is read.
    """

    format: int = _FORMAT
    model: str
    key: str
    num_bytes: int
    digest: str
    self_check: tuple[int, ...]
    degree: int = 1

    @property
    def of(self) -> SnapshotId:
        return SnapshotId(self.model, self.degree)


@dataclass(frozen=True, slots=True)
class _StoredSnapshot:
    """A returned snapshot with its name in the service manager."""

    name: str
    fd: int
    label: Label


class _Unfit(Exception):
    """Returned descriptors that are no valid snapshot, with the reason."""


class StoredSnapshots:
    """Stores the cache's snapshots in the service manager, and restores snapshots at the start.

    Has no effect without a service manager.
    """

    def __init__(self, store: FdStore, keys: SnapshotKeys) -> None:
        """Examine the returned descriptors; close the descriptors of invalid snapshots."""
        self._store = store
        self._keys = keys
        self._names: dict[int, str] = {}  # by the descriptor of the snapshot in this process
        self._found: dict[SnapshotId, _StoredSnapshot] = {}
        self._taking = asyncio.Lock()
        self._sort_out()

    def store(self, of: SnapshotId, snapshot: CachedSnapshot) -> None:
        """Store a snapshot unless stored already.

        A failure is logged: the snapshot then ends with the daemon.
        """
        key = self._keys.get(of)
        if snapshot.fd in self._names or key is None or not self._store.is_there:
            return
        name = f"{PREFIX}{secrets.token_hex(8)}"
        label = Label(
            model=of.model,
            degree=of.degree,
            key=key,
            num_bytes=snapshot.num_bytes,
            digest=snapshot.digest,
            self_check=snapshot.self_check,
        )
        try:
            label_fd = _sealed(msgspec.json.encode(label))
        except OSError as error:
            _logger.warning("%s: the snapshot is not stored by systemd: %s", of, error)
            return
        try:
            if self._store.keep(name, (snapshot.fd, label_fd)):
                self._names[snapshot.fd] = name
        finally:
            os.close(label_fd)

    def release(self, snapshot: CachedSnapshot) -> None:
        """Remove a snapshot from the store; to be called while its descriptor is open."""
        name = self._names.pop(snapshot.fd, None)
        if name is not None:
            self._store.drop(name)

    async def restore(
        self,
        models: Sequence[ModelToLoad],
        ready: WorkerReady,
        cache: SnapshotCache,
        degree: int = 1,
        later: Collection[int] = (),
    ) -> None:
        """Put returned snapshots of ``models`` into the cache, in that order while they fit.

        ``ready`` describes a worker of ``degree`` GPUs. Other returned snapshots are dropped,
        except those of the degrees in ``later``, whose workers will come.
        """
        async with self._taking:
            for model in models if self._found else ():
                await self._restore(model, ready, cache, degree)
            kept = {of: snapshot for of, snapshot in self._found.items() if of.degree in later}
            for of, stored in self._found.items():
                if of in kept:
                    continue
                size = format_bytes(stored.label.num_bytes)
                _logger.warning("%s: the snapshot of %s stored by systemd is not needed", of, size)
                self._release(stored.name, stored.fd)
            self._found = kept

    async def _restore(
        self, model: ModelToLoad, ready: WorkerReady, cache: SnapshotCache, degree: int
    ) -> None:
        of = SnapshotId(model.name, degree)
        stored = self._found.get(of)
        if stored is None or cache.get(of) is not None:
            return
        label = stored.label
        if await self._keys.note(model, ready, degree) != label.key:
            _logger.warning("%s: the snapshot stored by systemd is of another checkpoint", of)
        elif cache.short_bytes(of, label.num_bytes) == 0:
            del self._found[of]
            self._names[stored.fd] = stored.name
            cache.put(of, stored.fd, label.digest, label.self_check)
            size = format_bytes(label.num_bytes)
            _logger.info("%s: the snapshot of %s has outlived the last daemon", of, size)

    def _sort_out(self) -> None:
        by_name: defaultdict[str, list[int]] = defaultdict(list)
        for named in self._store.stored:
            by_name[named.name].append(named.fd)
        for name, fds in by_name.items():
            try:
                stored = _checked(name, fds)
                if stored.label.of in self._found:
                    raise _Unfit(f"a second snapshot of {stored.label.of}")
            except (_Unfit, OSError) as error:
                _logger.warning("%s: the snapshot stored by systemd is not used: %s", name, error)
                self._release(name, *fds)
                continue
            self._found[stored.label.of] = stored
            for fd in fds:
                if fd != stored.fd:
                    os.close(fd)

    def _release(self, name: str, *fds: int) -> None:
        self._store.drop(name)
        for fd in fds:
            os.close(fd)


def _checked(name: str, fds: Sequence[int]) -> _StoredSnapshot:
    """Return the snapshot and its label, distinguished by their seals.

    Raises _Unfit, OSError: the descriptors are no valid snapshot with a label.
    """
    labels = [fd for fd in fds if _seals(fd) & _FIXED == _FIXED]
    snapshots = [fd for fd in fds if _seals(fd) & _FIXED == _FIXED & ~fcntl.F_SEAL_WRITE]
    if len(labels) != 1 or len(snapshots) != 1 or len(fds) != 2:
        raise _Unfit(
            f"{len(snapshots)} snapshots and {len(labels)} labels in {len(fds)} descriptors"
        )
    try:
        label = msgspec.json.decode(os.pread(labels[0], _MAX_LABEL_BYTES, 0), type=Label)
    except msgspec.DecodeError as error:
        raise _Unfit(f"invalid label: {error}") from error
    if label.format != _FORMAT:
        raise _Unfit(f"the label has format {label.format}, this gpupoold reads {_FORMAT}")
    num_bytes = os.fstat(snapshots[0]).st_size
    if num_bytes != label.num_bytes:
        raise _Unfit(f"{num_bytes} bytes instead of {label.num_bytes}")
    return _StoredSnapshot(name, snapshots[0], label)


def _seals(fd: int) -> int:
    """Return the seals; raise OSError for a descriptor that is no memfd."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS)


def _sealed(data: bytes) -> int:
    """Return a memfd with ``data``, sealed against all changes."""
    fd = os.memfd_create("gpupool-label", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED)
    except BaseException:
        os.close(fd)
        raise
    return fd
