"""Images of requests: from ``data:`` URLs and listed hosts, within bounds; no audio, no video."""

from __future__ import annotations

import asyncio
import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pybase64
import vllm.envs as envs
from urllib3.util import Url, parse_url
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.cache.base import MultiModalCache
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, ImageMediaIO, MediaConnector, MediaIO

from gpupoold.frontend.client_answer import for_clients
from gpupoold.frontend.image_bounds import (
    MAX_IMAGE_BYTES,
    NUM_DECODING,
    BadImage,
    image_size,
    request_images,
)
from gpupoold.frontend.vllm_bounds import charge
from gpupoold.system.process import lower_priority

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
        if not is_data:
            charge(len(data), "image_url")
        return data

    async def _decode(self, data: bytes, image_mode: str | None) -> Any:
        options = {"image_mode": image_mode} | self.media_io_kwargs.get("image", {})
        max_pixels = options.pop(MAX_PIXELS, envs.VLLM_MAX_IMAGE_PIXELS)
        loop, images = asyncio.get_running_loop(), request_images.get()
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
        images = request_images.get()
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
    if items := prompt.get("mm_kwargs") if isinstance(prompt, dict) else None:
        charge(num_samples * MultiModalCache.get_item_size(items), "image_url")


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
