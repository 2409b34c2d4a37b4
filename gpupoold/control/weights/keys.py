"""Keys of weights snapshots: digests of all inputs of a snapshot's bytes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator

import msgspec
from blake3 import blake3

from gpupoold.control.weights.cache import SnapshotId
from gpupoold.control.weights.snapshot_files import FORMAT
from gpupoold.engine_options.adapter_support import without_adapter_support
from gpupoold.engine_options.names import engine_part
from gpupoold.errors import Failed, GpupoolError
from gpupoold.wire.messages import ModelToLoad, WorkerReady

_logger = logging.getLogger(__name__)

# Names, targets, and the hosts and limits of media do not change a model's weights, nor do slots of
# adapters.
_IN_SNAPSHOT = ("allow_remote_code", "dtype", "engine", "max_model_len", "path")


def snapshot_key(model: ModelToLoad, engine_version: str, device_name: str, page_bytes: int) -> str:
    """Return a hex digest of all inputs of the model's snapshot.

    The name of a group's device begins with the number of its GPUs.
    A checkpoint counts by paths, sizes and modification times of its files, without hidden files.
    To be called before the engine reads the files, because a later change would go unnoticed.

    Raises:
        Failed: the checkpoint's folder cannot be read.
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
