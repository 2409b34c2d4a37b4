"""Images of requests: from ``data:`` URLs and listed hosts, within bounds; no audio, no video."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

import pybase64
import vllm.envs as envs
from urllib3.util import Url, parse_url
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.cache.base import MultiModalCache
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, ImageMediaIO, MediaConnector, MediaIO

from gpupoold.frontend.client_texts import for_clients
from gpupoold.frontend.errors import ApiError
from gpupoold.frontend.gates import refuse
from gpupoold.frontend.in_flight import BodyHolding
from gpupoold.system.process import lower_priority

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

MAX_PIXELS = "max_pixels"
"""The key of ``media_io_kwargs["image"]`` with the limit of the pixels of a request's images."""
_SHOWN_CHARS = 200
# vLLM's message beyond a limit of ``limit_mm_per_prompt``.
_TOO_MANY = re.compile(r"At most (\d+) (\w+)\(s\) may be provided")

# Threads for images yield the cores to steps and streams.
_NICENESS = 10
_decoders = ThreadPoolExecutor(
    NUM_DECODING, "images", initializer=lower_priority, initargs=(_NICENESS,)
)


class _Encoded(MediaIO[bytes]):  # type: ignore[misc, unused-ignore]
    """An image as its encoded bytes."""

    def get_max_bytes(self) -> int:
        return MAX_IMAGE_BYTES

    def load_bytes(self, data: bytes) -> bytes:
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        return pybase64.b64decode(data, validate=True)

    def load_file(self, filepath: Path) -> NoReturn:
        raise BadImage(f"{filepath} is a file of the server.")


@MEDIA_CONNECTOR_REGISTRY.register("gpupool")
class AllowListConnector(MediaConnector):  # type: ignore[misc, unused-ignore]
    """vLLM's connector for images within bounds.

    In contrast to vLLM, an empty host list permits no host, and every error is a client's error.
    """

    def _assert_url_in_allowed_media_domains(self, url_spec: Url) -> None:
        if url_spec.hostname not in self.allowed_media_domains:
            raise VLLMValidationError(
                f"Media are not fetched from {str(url_spec.hostname)[:_SHOWN_CHARS]!r}. Send them "
                "in the request as a data: URL, or ask for the host to be listed in "
                "security.media_hosts.",
                parameter="image_url",
            )

    async def fetch_image_async(self, image_url: str, *, image_mode: str | None = "RGB") -> Any:
        """Return the image at a URL.

        Raises:
            VLLMValidationError: the image cannot be fetched or read, or exceeds a bound.
        """
        try:
            data = await self._fetch(image_url)
            return await self._decode(data, image_mode)
        except ApiError as error:
            refuse(error)
            raise VLLMValidationError(error.message, parameter="image_url") from error
        except Exception as error:
            # Subclasses of vLLM's error have other statuses, or name other parameters.
            if type(error) is VLLMValidationError:
                raise
            raise VLLMValidationError(_why(image_url, error), parameter="image_url") from error

    async def fetch_video_async(self, *_: object, **__: object) -> NoReturn:
        raise _not_served("video")

    async def fetch_audio_async(self, *_: object, **__: object) -> NoReturn:
        raise _not_served("audio")

    async def _fetch(self, url: str) -> bytes:
        is_data = url[:5].lower() == "data:"
        if not is_data and parse_url(url).scheme not in ("http", "https"):
            raise BadImage(f"The image {_shown(url)} is neither a data: URL nor on a web server.")
        timeout_s = envs.VLLM_IMAGE_FETCH_TIMEOUT
        data: bytes = await self.load_from_url_async(url, _Encoded(), fetch_timeout=timeout_s)
        images = request_images()
        if images is not None and not is_data:
            images.add_bytes(len(data))
        return data

    async def _decode(self, data: bytes, image_mode: str | None) -> Any:
        options = {"image_mode": image_mode} | self.media_io_kwargs.get("image", {})
        max_pixels = options.pop(MAX_PIXELS, envs.VLLM_MAX_IMAGE_PIXELS)
        loop, images = asyncio.get_running_loop(), request_images()
        size = await loop.run_in_executor(_decoders, image_size, data)
        if images is not None:
            images.add_pixels(size, max_pixels)
            await images.begin()
        decode = ImageMediaIO(**options).load_bytes
        return await loop.run_in_executor(_decoders, decode, data)


def bound_media(renderer: Any) -> None:
    """Make vLLM's renderer bound images, and name them by content only.

    A client's ``uuid`` would name an image in caches that all clients share.
    """
    if renderer.mm_processor is None:
        return
    process, render = renderer._process_multimodal_async, renderer.render_chat_async

    async def process_by_content(*args: Any, mm_uuids: object = None, **kwargs: Any) -> Any:
        return await process(*args, mm_uuids=None, **kwargs)

    async def render_bounded(*args: Any, **kwargs: Any) -> Any:
        images = request_images()
        with contextlib.nullcontext() if images is None else images.rendering():
            try:
                return await render(*args, **kwargs)
            except VLLMValidationError as error:
                if too_many := _TOO_MANY.search(str(error)):
                    if too_many[2] in ("audio", "video"):
                        raise _not_served(too_many[2]) from error
                    text = f"A prompt may have at most {too_many[1]} images (limits.max_images)."
                    raise VLLMValidationError(text, parameter="image_url") from error
                raise

    renderer._mm_executor.submit(lower_priority, _NICENESS)
    renderer._process_multimodal_async = process_by_content
    renderer.render_chat_async = render_bounded


def count_features(prompt: Any, num_samples: int) -> None:
    """Count a prompt's processed images as bytes in flight, once for each of the answers.

    Raises:
        VLLMValidationError: too many bytes are in flight; the client gets 413 or 429.
    """
    images = request_images()
    items = prompt.get("mm_kwargs") if isinstance(prompt, dict) else None
    if images is None or not items:
        return
    try:
        images.add_bytes(num_samples * MultiModalCache.get_item_size(items))
    except ApiError as error:
        refuse(error)
        raise VLLMValidationError(error.message, parameter="image_url") from error


def _not_served(modality: str) -> VLLMValidationError:
    return VLLMValidationError(
        f"This server takes text and images, but no {modality}.", parameter=modality
    )


def _why(url: str, error: Exception) -> str:
    if isinstance(error, BadImage):
        return str(error)
    reason = for_clients(str(error)[:_SHOWN_CHARS]) or type(error).__name__
    return f"The image {_shown(url)} cannot be used: {reason}"


def _shown(url: str) -> str:
    return repr(url[:40] + "..." if len(url) > 40 else url)


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
    """The images of one HTTP request: their pixels, their bytes, and the slot for decoding.

    A request waits for a slot at its first image and releases the slot when no conversation is
    rendered any more. ``slots`` are those of the process. For the event loop, except
    ``add_pixels``.
    """

    def __init__(self, holding: BodyHolding, slots: asyncio.Semaphore) -> None:
        self._holding = holding
        self._slots = slots
        self._lock = threading.Lock()
        self._num_pixels = 0
        self._num_rendering = 0
        self._beginning: asyncio.Task[bool] | None = None

    def add_bytes(self, num_bytes: int) -> None:
        """Count fetched images, or processed images, as bytes in flight."""
        self._holding.add(num_bytes)

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


_current: ContextVar[RequestImages | None] = ContextVar("request_images", default=None)


@contextlib.contextmanager
def bounding_images(holding: BodyHolding, slots: asyncio.Semaphore) -> Iterator[None]:
    """Bound the images of the context, and of its tasks, as those of one HTTP request."""
    images = RequestImages(holding, slots)
    token = _current.set(images)
    try:
        yield
    finally:
        _current.reset(token)
        images.end()


def request_images() -> RequestImages | None:
    """Return the images of the HTTP request being served."""
    return _current.get()
