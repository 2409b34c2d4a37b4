"""Snapshots that outlive the daemon: the service manager has their descriptors too.

What is kept of a snapshot under one name (``snapshot-`` and 16 random digits) are two memfds: the
snapshot, and a small sealed one that says what it is. A daemon that starts again gets both back
and takes the snapshot if

- neither can change its size any more, and the snapshot has the size that is written down;
- it belongs to a registered model of that name, whose checkpoint and engine still have the
  same key (:mod:`gpupoold.control.weights.keys`);
- it fits in ``memory.model_cache``.

Its bytes are not compared: nobody writes to a snapshot after it was made, and a model that is
loaded with it has to answer its self-check's prompt as before, else the checkpoint is read.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gpupoold.control.weights.cache import CachedSnapshot, SnapshotCache
from gpupoold.control.weights.keys import SnapshotKeys
from gpupoold.system.systemd import FdStore
from gpupoold.units import format_bytes
from gpupoold.wire.messages import ModelToLoad, WorkerReady

_logger = logging.getLogger(__name__)

PREFIX = "snapshot-"
# Descriptors of releases that called a snapshot an image; they are dropped from the store.
EARLIER_PREFIX = "image-"
_FIXED_SIZE = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
_FIXED = _FIXED_SIZE | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_FORMAT = 1
_MAX_LABEL_BYTES = 1 << 16


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot is: whose, under which key, and what ``CachedSnapshot`` has of it."""

    format: int = _FORMAT
    model: str
    key: str
    num_bytes: int
    digest: str
    self_check: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _StoredSnapshot:
    """A snapshot that came back, under the name by which the service manager knows it."""

    name: str
    fd: int
    label: Label


class _Unfit(Exception):
    """Why what came back is no snapshot."""


class StoredSnapshots:
    """Has the cache's snapshots kept by the service manager, and brings them back at the start.

    Without one it does nothing.
    """

    def __init__(self, store: FdStore, keys: SnapshotKeys) -> None:
        """Looks through what the store has given back; what is no snapshot is closed."""
        self._store = store
        self._keys = keys
        self._names: dict[int, str] = {}  # by the snapshot's descriptor here
        self._found: dict[str, _StoredSnapshot] = {}
        self._taking = asyncio.Lock()
        self._sort_out()

    def store(self, model: str, snapshot: CachedSnapshot) -> None:
        """Have the model's snapshot kept from now on, unless it is already.

        One that cannot be given away is logged: it is there as long as the daemon.
        """
        key = self._keys.get(model)
        if snapshot.fd in self._names or key is None or not self._store.is_there:
            return
        name = f"{PREFIX}{secrets.token_hex(8)}"
        label = Label(
            model=model,
            key=key,
            num_bytes=snapshot.num_bytes,
            digest=snapshot.digest,
            self_check=snapshot.self_check,
        )
        try:
            label_fd = _sealed(msgspec.json.encode(label))
        except OSError as error:
            _logger.warning("%s: its snapshot is not kept by systemd: %s", model, error)
            return
        try:
            if self._store.keep(name, (snapshot.fd, label_fd)):
                self._names[snapshot.fd] = name
        finally:
            os.close(label_fd)

    def release(self, snapshot: CachedSnapshot) -> None:
        """The snapshot is not to be kept any more; to be called while its descriptor is open."""
        name = self._names.pop(snapshot.fd, None)
        if name is not None:
            self._store.drop(name)

    async def take_back(
        self, models: Sequence[ModelToLoad], ready: WorkerReady, cache: SnapshotCache
    ) -> None:
        """Put the snapshots that came back and belong to ``models`` into the cache, in that order
        as far as they fit; the others are let go. For a worker that is ``ready``."""
        async with self._taking:
            for model in models if self._found else ():
                await self._take_back(model, ready, cache)
            for stored in self._found.values():
                _logger.warning(
                    "%s: its snapshot of %s came back and is not needed",
                    stored.label.model,
                    format_bytes(stored.label.num_bytes),
                )
                self._let_go(stored.name, stored.fd)
            self._found.clear()

    async def _take_back(
        self, model: ModelToLoad, ready: WorkerReady, cache: SnapshotCache
    ) -> None:
        stored = self._found.get(model.name)
        if stored is None or cache.get(model.name) is not None:
            return
        label = stored.label
        if await self._keys.note(model, ready) != label.key:
            _logger.warning("%s: the snapshot that came back is of another checkpoint", model.name)
        elif cache.short_bytes(model.name, label.num_bytes) == 0:
            del self._found[model.name]
            self._names[stored.fd] = stored.name
            cache.put(model.name, stored.fd, label.digest, label.self_check)
            _logger.info(
                "%s: its snapshot of %s has outlived the last daemon",
                model.name,
                format_bytes(label.num_bytes),
            )

    def _sort_out(self) -> None:
        by_name: defaultdict[str, list[int]] = defaultdict(list)
        for one in self._store.stored:
            by_name[one.name].append(one.fd)
        for name, fds in by_name.items():
            try:
                stored = _checked(name, fds)
                if stored.label.model in self._found:
                    raise _Unfit(f"it is the second one of {stored.label.model}")
            except (_Unfit, OSError) as error:
                _logger.warning("what systemd kept as %s is not used: %s", name, error)
                self._let_go(name, *fds)
                continue
            self._found[stored.label.model] = stored
            for fd in fds:
                if fd != stored.fd:
                    os.close(fd)

    def _let_go(self, name: str, *fds: int) -> None:
        self._store.drop(name)
        for fd in fds:
            os.close(fd)


def _checked(name: str, fds: Sequence[int]) -> _StoredSnapshot:
    """The snapshot and its label, told apart by their seals.

    Raises:
        _Unfit, OSError: they are not what was given to be kept.
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
        raise _Unfit(f"its label is wrong: {error}") from error
    if label.format != _FORMAT:
        raise _Unfit(f"its label has format {label.format}, this gpupoold reads {_FORMAT}")
    num_bytes = os.fstat(snapshots[0]).st_size
    if num_bytes != label.num_bytes:
        raise _Unfit(f"it has {num_bytes} bytes instead of {label.num_bytes}")
    return _StoredSnapshot(name, snapshots[0], label)


def _seals(fd: int) -> int:
    """Raises OSError for what is no memfd."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS)


def _sealed(data: bytes) -> int:
    """A memfd with ``data`` that nobody can change."""
    fd = os.memfd_create("gpupool-label", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED)
    except BaseException:
        os.close(fd)
        raise
    return fd
