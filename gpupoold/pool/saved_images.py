"""Images on disk as the daemon uses them: looked for before a load, written after one."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from gpupoold.errors import GpupoolError
from gpupoold.pool.image_cache import CachedImage
from gpupoold.pool.image_files import ImageFiles, SavedImage, image_key
from gpupoold.units import format_bytes
from gpupoold.wire.messages import InstanceReady, ModelToLoad

_logger = logging.getLogger(__name__)


class SavedImages:
    """The registered models' images in a folder, within a byte budget; 0 bytes: there are none.

    Saving goes on in the background and never fails a load.
    """

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self._files = ImageFiles(folder)
        self._budget_bytes = budget_bytes
        self._keys: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def find(self, model: ModelToLoad, ready: InstanceReady) -> SavedImage | None:
        """The model's image for such an instance, its descriptor the caller's; None without."""
        if not self._budget_bytes:
            return None
        try:
            key = await asyncio.to_thread(
                image_key, model, ready.engine_version, ready.device_name, ready.page_bytes
            )
        except GpupoolError as error:
            _logger.warning("%s", error)
            return None
        self._keys[model.name] = key
        return await asyncio.to_thread(self._files.load, key)

    def keep(self, name: str, image: CachedImage) -> None:
        """Save the image of a model that was looked for before; in the background."""
        key = self._keys.get(name)
        if key is None:
            return
        task = asyncio.create_task(asyncio.to_thread(self._save, name, key, _copy(image)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, name: str) -> None:
        """The model has been removed: its file goes, unless another model has the same."""
        key = self._keys.pop(name, None)
        if key is not None and key not in self._keys.values():
            self._files.drop(key)

    async def tidy(self, names: list[str]) -> None:
        """Delete what belongs to none of the models there are: to changed checkpoints, say.

        Nothing happens before all of them have been looked for.
        """
        if self._budget_bytes and all(name in self._keys for name in names):
            await asyncio.to_thread(self._files.remove_others, set(self._keys.values()))

    async def stop(self) -> None:
        """Wait for what is being saved."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _save(self, name: str, key: str, image: CachedImage) -> None:
        try:
            others = [file for file in self._files.list() if file.key != key]
            used_bytes = sum(file.num_bytes for file in others)
            if used_bytes + image.num_bytes > self._budget_bytes:
                _logger.warning(
                    "%s: its image of %s is not saved: %s of %s are used (memory.image_files)",
                    name,
                    format_bytes(image.num_bytes),
                    format_bytes(used_bytes),
                    format_bytes(self._budget_bytes),
                )
                return
            self._files.save(key, image.fd, image.digest, image.canary)
        except (GpupoolError, OSError) as error:
            _logger.warning("%s: its image could not be saved: %s", name, error)
        finally:
            os.close(image.fd)


def _copy(image: CachedImage) -> CachedImage:
    """The same with a descriptor of its own: the cache may drop the image meanwhile."""
    return CachedImage(os.dup(image.fd), image.num_bytes, image.digest, image.canary)
