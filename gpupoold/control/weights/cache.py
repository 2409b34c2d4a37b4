"""The model cache: weight images in shared host memory, owned by the daemon. Bookkeeping."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CachedImage:
    """A model's image: the daemon's descriptor of its memfd, and what layout it has.

    ``canary`` is what the model answers with it to a fixed prompt.
    """

    fd: int
    num_bytes: int
    digest: str
    canary: tuple[int, ...] = ()


class Shelf(Protocol):
    """Who keeps images beyond the daemon's life."""

    def park(self, model: str, image: CachedImage) -> None:
        """Keep the model's image too."""

    def release(self, image: CachedImage) -> None:
        """The image is on its way out."""


class ImageCache:
    """One image per model within a byte budget; all workers share its memory.

    What ``shelf`` keeps of it are the images that nobody has let go.

    ``pinned`` are the models whose images are to stay. Bytes of images that are on their way
    in or out count as used. ``num_evicted`` images have gone before their models did.
    """

    def __init__(self, budget_bytes: int, now: Callable[[], float] = time.time) -> None:
        self.budget_bytes = budget_bytes
        self.shelf: Shelf | None = None
        self.pinned: set[str] = set()
        self.num_evicted = 0
        self._now = now
        self._images: dict[str, CachedImage] = {}
        self._leaving: dict[str, CachedImage] = {}
        self._reserved_bytes: dict[str, int] = {}
        self._last_used_at: dict[str, float] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all images, with those on their way."""
        images = (*self._images.values(), *self._leaving.values())
        return sum(image.num_bytes for image in images) + sum(self._reserved_bytes.values())

    @property
    def images(self) -> dict[str, CachedImage]:
        """The images by model, without those on their way."""
        return dict(self._images)

    def get(self, model: str) -> CachedImage | None:
        """The model's image, if it is in host memory."""
        return self._images.get(model)

    def short_bytes(self, model: str, num_bytes: int) -> int:
        """By how much an image of ``num_bytes`` would go over the budget; 0 if it would not.

        An image that the model has is replaced.
        """
        others_bytes = self.used_bytes - self._reserved_bytes.get(model, 0)
        if (image := self._images.get(model)) is not None:
            others_bytes -= image.num_bytes
        return max(0, others_bytes + num_bytes - self.budget_bytes)

    def reserve(self, model: str, num_bytes: int) -> None:
        """Keep room for the model's image, which is to have ``num_bytes``."""
        image = self._images.get(model)
        held_bytes = 0 if image is None else image.num_bytes
        self._reserved_bytes[model] = max(0, num_bytes - held_bytes)

    def release(self, model: str) -> None:
        """The room that was kept is not needed any more."""
        self._reserved_bytes.pop(model, None)

    def put(self, model: str, fd: int, digest: str, canary: tuple[int, ...] = ()) -> CachedImage:
        """Keep the image behind ``fd``, which the cache owns from now on, in the room for it.

        The one that the model has is kept if it is the same.
        """
        self.release(model)
        old = self._images.get(model)
        image = CachedImage(fd, os.fstat(fd).st_size, digest, canary)
        if old is not None and _is_same(old, image):
            os.close(fd)
            return old
        self.drop(model)
        self._images[model] = image
        if self.shelf is not None:
            self.shelf.park(model, image)
        return image

    def retire(self, model: str) -> None:
        """The image is on its way out: it is nobody's from now on, but its memory is used."""
        image = self._images.pop(model)
        self._take_off_shelf(image)
        self._leaving[model] = image
        self.num_evicted += 1

    def drop_retired(self, model: str) -> None:
        """No worker has the retired image any more."""
        self._close(self._leaving, model)

    def drop(self, model: str) -> None:
        """Let the image go; its memory is freed when no worker has it mapped."""
        if (image := self._images.get(model)) is not None:
            self._take_off_shelf(image)
        self._close(self._images, model)

    def touch(self, model: str, at: float | None = None) -> None:
        """The model has been used, now or ``at`` (wall-clock seconds)."""
        self._last_used_at[model] = self._now() if at is None else at

    def last_used_at(self, model: str) -> float | None:
        """When the model was used last, in wall-clock seconds; None when that is not known."""
        return self._last_used_at.get(model)

    def forget(self, model: str) -> None:
        """The model is gone, with its image."""
        self.drop(model)
        self.release(model)
        self.pinned.discard(model)
        self._last_used_at.pop(model, None)

    def close(self) -> None:
        """Let all images go; what is kept elsewhere stays there."""
        for images in (self._images, self._leaving):
            for model in list(images):
                self._close(images, model)

    def _take_off_shelf(self, image: CachedImage) -> None:
        if self.shelf is not None:
            self.shelf.release(image)

    @staticmethod
    def _close(images: dict[str, CachedImage], model: str) -> None:
        image = images.pop(model, None)
        if image is not None:
            os.close(image.fd)


def _is_same(one: CachedImage, other: CachedImage) -> bool:
    is_alike = (one.digest, one.canary) == (other.digest, other.canary)
    return is_alike and os.path.sameopenfile(one.fd, other.fd)
