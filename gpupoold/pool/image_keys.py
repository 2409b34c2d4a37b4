"""What decides which weight image a model has: the key under which it is saved."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
from blake3 import blake3

from gpupoold.errors import Failed
from gpupoold.pool.image_files import FORMAT
from gpupoold.wire.messages import ModelToLoad

# What a model is called and how fast it shall be is not in its weights.
_NOT_IN_IMAGE = frozenset({"name", "aliases", "ttft_s", "tbt_s"})


def image_key(model: ModelToLoad, engine_version: str, device_name: str, page_bytes: int) -> str:
    """Hex digest of all that decides what is in the model's image.

    A checkpoint counts by the paths, sizes and modification times of its files, not hidden
    ones. Take the key before the engine reads them: else a change meanwhile goes unseen.

    Raises:
        Failed: the checkpoint's folder cannot be read.
    """
    fields = msgspec.structs.asdict(model)
    decisive = sorted((name, fields[name]) for name in fields.keys() - _NOT_IN_IMAGE)
    try:
        files = sorted(_checkpoint_files(model.path))
    except OSError as error:
        raise Failed(
            f"{model.name}: cannot look through the checkpoint {model.path}: {error}",
            "mend the folder or add the model again",
        ) from error
    what = (FORMAT, engine_version, device_name, page_bytes, decisive, files)
    return blake3(msgspec.json.encode(what)).hexdigest()


def _checkpoint_files(folder: str) -> Iterator[tuple[bytes, int, int]]:
    """Relative path, bytes and mtime in ns of each file; every folder once, for links may loop."""
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
