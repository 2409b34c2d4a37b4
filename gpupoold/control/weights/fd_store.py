"""Snapshots that survive the daemon in the service manager's fd store.

Each stored snapshot has two memfds under one name (``snapshot-`` and 16 random digits): the data,
and a small sealed label. A new daemon gets both back and uses the snapshot if

- both memfds have sealed sizes, and the data has the size in the label;
- the label names a registered model whose checkpoint and engine still have the same key for the
  workers of the label's degree
  (:mod:`gpupoold.control.weights.keys`);
- the snapshot fits in ``memory.model_cache``.

The bytes are not compared: no process writes to a finished snapshot, and a model loaded from a
snapshot must pass its self-check, else the checkpoint is read.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from gpupoold.control.weights.cache import CachedSnapshot, SnapshotCache, SnapshotId
from gpupoold.control.weights.keys import SnapshotKeys
from gpupoold.system.systemd import FdStore
from gpupoold.units import format_bytes
from gpupoold.wire.messages import ModelToLoad, WorkerReady

_logger = logging.getLogger(__name__)

PREFIX = "snapshot-"
_FIXED_SIZE = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
_FIXED = _FIXED_SIZE | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_FORMAT = 1
_MAX_LABEL_BYTES = 1 << 16


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot's description: model, degree, key, and the fields of ``CachedSnapshot``."""

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
            kept = {of: one for of, one in self._found.items() if of.degree in later}
            for of, stored in self._found.items():
                if of in kept:
                    continue
                _logger.warning(
                    "%s: the snapshot of %s stored by systemd is not needed",
                    of,
                    format_bytes(stored.label.num_bytes),
                )
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
            _logger.info(
                "%s: the snapshot of %s has outlived the last daemon",
                of,
                format_bytes(label.num_bytes),
            )

    def _sort_out(self) -> None:
        by_name: defaultdict[str, list[int]] = defaultdict(list)
        for one in self._store.stored:
            by_name[one.name].append(one.fd)
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

    Raises:
        _Unfit, OSError: the descriptors are no valid snapshot with a label.
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
