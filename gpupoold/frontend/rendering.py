"""Rendering of conversations within bounds: images of requests, CPU time of chat templates.

Images come from ``data:`` URLs and listed hosts; there is no audio and no video.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import re
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pybase64
import vllm.envs as envs
from jinja2 import filters
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from urllib3.util import Url, parse_url
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.cache.base import MultiModalCache
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, ImageMediaIO, MediaConnector, MediaIO
from vllm.renderers import hf

from gpupoold.frontend.body import let_others_run
from gpupoold.frontend.errors import for_clients
from gpupoold.frontend.request_context import (
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

MAX_RENDER_S = 2.0
"""Limit of CPU time for one conversation, in seconds; ordinary templates take milliseconds."""
_LOOK_S = 0.05
_MAX_BITS = 4096
"""Limit of the integers that a template's products and powers give."""
_MAX_DECIMALS = 1000
_MESSAGE_BYTES = 40  # about the least that a message takes in a body


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

        Raises VLLMValidationError: the image cannot be fetched or read, or exceeds a bound.
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

    Raises VLLMValidationError: too many bytes are in flight; the client gets 413 or 429.
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


class _TooSlow(BaseException):
    """Raised inside a rendering thread; no handler of a template catches it."""


@dataclass(eq=False, slots=True)
class _Rendering:
    thread_id: int = field(default_factory=threading.get_ident)
    clock: int = 0
    ends_s: float = 0.0
    is_stopped: bool = False


class RenderLimit:
    """Ends chat templates that take too much CPU time; one watching thread for all.

    A template is a program of the checkpoint's author, and its time depends on the client's text.
    vLLM renders in a thread, which no caller can end: after its own limit vLLM leaves the thread
    running.

    The limit acts between two instructions of the interpreter. Powers of integers, one instruction
    of any length, are bounded in size; docs/security.md names what is not bounded.
    """

    def __init__(self, max_cpu_s: float) -> None:
        self._max_cpu_s = max_cpu_s
        self._lock = threading.Lock()
        self._jobs: set[_Rendering] = set()
        self._has_jobs = threading.Event()
        self._thread: threading.Thread | None = None

    def run(self, render: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the function's result.

        Raises VLLMValidationError: the function took longer than the limit.
        """
        job = self._begin()
        try:
            try:
                return render(*args, **kwargs)
            finally:
                self._end(job)
        except _TooSlow:
            self._end(job)  # the exception may have come before the end of the first call
            raise VLLMValidationError(
                f"The chat template of this model takes more than {self._max_cpu_s:g} s of CPU "
                "time for this conversation. Send a shorter conversation."
            ) from None

    def _begin(self) -> _Rendering:
        job = _Rendering()
        job.clock = time.pthread_getcpuclockid(job.thread_id)
        job.ends_s = time.clock_gettime(job.clock) + self._max_cpu_s
        with self._lock:
            self._jobs.add(job)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="render-limit", daemon=True
                )
                self._thread.start()
        self._has_jobs.set()
        return job

    def _end(self, job: _Rendering) -> None:
        with self._lock:
            self._jobs.discard(job)
            if job.is_stopped:
                _raise_in(job.thread_id, None)

    def _watch(self) -> None:
        while True:
            self._has_jobs.wait()
            time.sleep(_LOOK_S)
            with self._lock:
                for job in self._jobs:
                    # The thread exists: it removes the job.
                    if not job.is_stopped and time.clock_gettime(job.clock) > job.ends_s:
                        job.is_stopped = True
                        _raise_in(job.thread_id, _TooSlow)
                if not self._jobs:
                    self._has_jobs.clear()


def _raise_in(thread_id: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next instruction; None takes a pending one back."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), raised)


def bound_arithmetic() -> None:
    """Bound the integers of all templates in this process."""
    sandbox: Any = ImmutableSandboxedEnvironment  # transformers makes it for each template
    sandbox.intercepted_binops = frozenset({"*", "**"})
    sandbox.call_binop = _bounded_operation
    filters.FILTERS["round"] = _round


def _bounded_operation(
    environment: ImmutableSandboxedEnvironment,
    context: Context,
    operator: str,
    left: Any,
    right: Any,
) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length()
        num_bits = num_bits * right if operator == "**" else num_bits + right.bit_length()
        if num_bits > _MAX_BITS:
            raise SecurityError("the chat template computes too large an integer")
    return environment.binop_table[operator](left, right)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    """Round as Jinja's filter, which computes a power of the precision."""
    if abs(precision) > _MAX_DECIMALS:
        raise SecurityError("the chat template rounds to too many decimals")
    return filters.do_round(value, precision, method)


@functools.cache
def bound_rendering() -> None:
    """Limit the CPU time of chat templates in this process.

    To be called before renderers are made, which keep a reference to vLLM's function.
    """
    bound_arithmetic()
    limit = RenderLimit(MAX_RENDER_S)
    # Not public: the function of all renderers with Jinja templates, on the loop and in threads.
    render = hf.safe_apply_chat_template
    hf.safe_apply_chat_template = functools.wraps(render)(functools.partial(limit.run, render))
    hf.parse_chat_messages_async = after_others(hf.parse_chat_messages_async)


def after_others(parse: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return vLLM's function for a conversation, which was validated just before.

    4,000 messages take 25 to 100 ms each time.
    """

    @functools.wraps(parse)
    async def parse_later(messages: list[Any], *args: Any, **kwargs: Any) -> Any:
        await let_others_run(len(messages) * _MESSAGE_BYTES)
        return await parse(messages, *args, **kwargs)

    return parse_later
