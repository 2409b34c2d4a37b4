"""The model cache: weight images in shared host memory, owned by the daemon."""

from __future__ import annotations

import os
from dataclasses import dataclass

from gpupoold.errors import Refused
from gpupoold.units import format_bytes


@dataclass(frozen=True, slots=True)
class CachedImage:
    """A model's image: the daemon's descriptor of its memfd, and what layout it has.

    ``canary`` is what the model answers with it to a fixed prompt.
    """

    fd: int
    num_bytes: int
    digest: str
    canary: tuple[int, ...] = ()


class ImageCache:
    """One image per model within a byte budget; all instances share its memory."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._images: dict[str, CachedImage] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all images."""
        return sum(image.num_bytes for image in self._images.values())

    def get(self, model: str) -> CachedImage | None:
        """The model's image, if it has been loaded before."""
        return self._images.get(model)

    def check_room(self, model: str, num_bytes: int) -> None:
        """See that an image of ``num_bytes`` may come in.

        Raises:
            Refused: it would go over the budget.
        """
        left_bytes = max(0, self.budget_bytes - self.used_bytes)
        if model not in self._images and num_bytes > left_bytes:
            raise Refused(
                f"{model}: an image of {format_bytes(num_bytes)} does not fit in the model cache, "
                f"{format_bytes(left_bytes)} of {format_bytes(self.budget_bytes)} are free",
                "raise memory.model_cache or remove a model",
            )

    def put(self, model: str, fd: int, digest: str, canary: tuple[int, ...] = ()) -> CachedImage:
        """Keep the image behind ``fd``, which the cache owns from now on."""
        self.drop(model)
        image = CachedImage(fd, os.fstat(fd).st_size, digest, canary)
        self._images[model] = image
        return image

    def drop(self, model: str) -> None:
        """Let the image go; its memory is freed when no instance has it mapped."""
        image = self._images.pop(model, None)
        if image is not None:
            os.close(image.fd)

    def close(self) -> None:
        """Let all images go."""
        for model in list(self._images):
            self.drop(model)
