"""Bounds on the images of one HTTP request, checked before an image is decoded."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
from collections.abc import Iterator

from gpupoold.frontend.client_answer import for_clients
from gpupoold.frontend.request_bounds import RequestLocal

MAX_IMAGE_BYTES = 20_000_000
"""Limit of an encoded image; a ``data:`` URL is also part of a bounded body."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
"""Formats by Pillow's names: the formats of OpenAI's API, and BMP."""
MAX_ASPECT_RATIO = 200
"""Limit of an image's longer side, in shorter sides: vLLM's processors for the Qwen families refuse
others too, but after they have made them."""
MAX_SCANS = 100
"""Limit of the scans of a JPEG: about ten are usual, and each scan takes time for all pixels."""
NUM_DECODING = 2
"""HTTP requests of a frontend whose images are decoded and processed at once."""

_MAX_ERROR_CHARS = 200
_SCAN = b"\xff\xda"


class BadImage(ValueError):
    """An image cannot be read, or exceeds a bound; the text is for the client."""


def image_size(data: bytes) -> tuple[int, int]:
    """Return width and height from the head of an encoded image, without decoding pixels.

    Raises:
        BadImage: the image has too many bytes or scans, a side too long for the other, or is in
            none of ``FORMATS``.
    """
    from PIL import Image, UnidentifiedImageError

    if len(data) > MAX_IMAGE_BYTES:
        raise BadImage(f"The image has {len(data):,} bytes, more than {MAX_IMAGE_BYTES:,}.")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            size, kind = image.size, image.format
    except UnidentifiedImageError as error:
        raise BadImage(f"The image is in none of the formats {', '.join(FORMATS)}.") from error
    except Exception as error:  # Pillow raises errors of many types for damaged files
        reason = for_clients(str(error)[:_MAX_ERROR_CHARS])
        raise BadImage(f"The image cannot be read: {reason}") from error
    width, height = size
    if max(size) > MAX_ASPECT_RATIO * max(1, min(size)):
        raise BadImage(
            f"The image has {width:,} x {height:,} pixels: one side is more than "
            f"{MAX_ASPECT_RATIO} times as long as the other."
        )
    if kind in ("JPEG", "MPO") and data.count(_SCAN) > MAX_SCANS:
        raise BadImage(f"The JPEG image has more than {MAX_SCANS} scans.")
    return size


class RequestImages:
    """The images of one HTTP request: their pixels, and the slot for decoding.

    A request waits for a slot at its first image and releases the slot when no conversation is
    rendered any more. ``slots`` are those of the process. For the event loop, except
    ``add_pixels``.
    """

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._lock = threading.Lock()
        self._num_pixels = 0
        self._num_rendering = 0
        self._beginning: asyncio.Task[bool] | None = None

    def add_pixels(self, size: tuple[int, int], max_pixels: int) -> None:
        """Count an image of ``size``, from any thread.

        Raises:
            BadImage: the request's images have more than ``max_pixels`` in total.
        """
        width, height = size
        with self._lock:
            self._num_pixels += width * height
            num_pixels = self._num_pixels
        if num_pixels > max_pixels:
            raise BadImage(
                f"With an image of {width:,} x {height:,}, the images of the request have "
                f"{num_pixels:,} pixels in total, more than {max_pixels:,} "
                "(limits.max_image_pixels). Send smaller or fewer images."
            )

    async def begin(self) -> None:
        """Return when the request has a slot for decoding."""
        if self._beginning is None:
            self._beginning = asyncio.create_task(self._slots.acquire())
        await asyncio.shield(self._beginning)

    @contextlib.contextmanager
    def rendering(self) -> Iterator[None]:
        """Keep the slot during the context, in which a conversation is rendered."""
        self._num_rendering += 1
        try:
            yield
        finally:
            self._num_rendering -= 1
            if not self._num_rendering:
                self.end()

    def end(self) -> None:
        """Release the slot, if any."""
        beginning, self._beginning = self._beginning, None
        if beginning is None:
            return
        if not beginning.done():
            beginning.cancel()
        elif not beginning.cancelled():
            self._slots.release()


request_images: RequestLocal[RequestImages] = RequestLocal("request_images")


@contextlib.contextmanager
def bounding_images(slots: asyncio.Semaphore) -> Iterator[None]:
    """Bound the images of the context, and of its tasks, as those of one HTTP request."""
    images = RequestImages(slots)
    try:
        with request_images.holding(images):
            yield
    finally:
        images.end()
