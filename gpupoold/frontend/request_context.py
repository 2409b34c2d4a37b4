"""What belongs to one HTTP request: ids, bytes in flight, images, counts of work for each token.

The work of each token is done in a frontend's event loop or in a worker's step, where other
requests wait. Each of the ``n`` answers to each prompt of an HTTP request causes the work again, in
the same steps. :mod:`.vllm_bounds` has the bounds that need vLLM, without which the frontend
begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from starlette.types import Scope, Send

from gpupoold.api_keys import KEY_BYTES_SHARE
from gpupoold.frontend.conversations import TokenIds
from gpupoold.frontend.errors import ApiError, bad_request, for_clients, over_rate

MAX_ENTRIES = 100_000
"""Limit of the log-probabilities of one HTTP request: 4,700 tokens of an answer with 20
alternatives each.
"""
MAX_ENTRIES_AT_ONCE = 25_000
"""The same where vLLM makes all entries in one piece on the event loop: the echoed prompt in a
stream, and everything in the responses API.
"""
INPUTS_AT_ONCE = 128
"""Inputs of a pooling request that wait or run at once, as requests of their own: to begin with
2,048 takes the event loop, and the daemon, most of a second without a pause.
"""

T = TypeVar("T")

_RETRY_NO_ROOM_S = 1.0

MAX_CLIENT_ID_CHARS = 128

_HEADER = b"x-request-id"
_CLIENT_ID = re.compile(rf"[!-~]{{1,{MAX_CLIENT_ID_CHARS}}}")

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


@dataclass(eq=False, slots=True)
class RequestTally:
    """The counts of one HTTP request so far, and its limits.

    Each of the ``num_prompts`` counts ``num_samples`` times. ``has_limit``: the client limits the
    tokens of an answer itself. ``max_entries`` bounds the log-probabilities, ``slots`` the inputs
    of a pooling request in the engine, whose ``token_ids`` were left out of the body.
    """

    num_prompts: int
    num_samples: int
    slots: asyncio.Semaphore
    has_limit: bool = False
    max_entries: int = MAX_ENTRIES
    token_ids: TokenIds | None = None
    num_prompt_tokens: int = 0
    num_entries: int = 0


class RequestLocal(Generic[T]):
    """A value for each HTTP request, as ``threading.local`` has for each thread."""

    def __init__(self, name: str) -> None:
        self._variable: ContextVar[T | None] = ContextVar(name, default=None)

    def get(self) -> T | None:
        """Return the value of the request being served, None outside of requests."""
        return self._variable.get()

    @contextlib.contextmanager
    def holding(self, value: T | None) -> Iterator[None]:
        """Set the value for the context, and for tasks that begin inside."""
        token = self._variable.set(value)
        try:
            yield
        finally:
            self._variable.reset(token)


counts: RequestLocal[RequestTally] = RequestLocal("request_counts")


class _Bound(NamedTuple):
    """``size`` returns the size of a field's value for one answer; ``what`` says of what."""

    size: Callable[[Any], int]
    most: int
    what: str


def _num_comparisons(detection: Any) -> int:
    """Return the most tokens that a search for repetitions compares for one token.

    A pattern of each size is compared with its ``min_count`` repetitions.
    """
    size = max(0, int(detection.max_pattern_size))
    return size * size * max(0, int(detection.min_count)) // 2


_BOUNDS: dict[str, _Bound] = {
    # At each change of the batch vLLM makes the biases and the tokens of all requests anew.
    "logit_bias": _Bound(len, 16_384, "tokens"),
    # Each new token is looked up in a list.
    "stop_token_ids": _Bound(len, 16_384, "tokens"),
    # Each string is searched in the new text.
    "stop": _Bound(lambda stop: 1 if isinstance(stop, str) else len(stop), 4_096, "strings"),
    # Each is compared with the last tokens.
    "bad_words": _Bound(len, 1_024, "words"),
    "repetition_detection": _Bound(
        _num_comparisons,
        65_536,
        "comparisons for each token (`max_pattern_size` squared, times `min_count`, halved)",
    ),
}


def why_too_much_work(params: Any, num_prompts: int = 1) -> tuple[str, str] | None:
    """Return the field that is over its bound, and why; None if none is.

    ``params`` are the sampling parameters of each of an HTTP request's ``num_prompts``.
    """
    num_answers = num_prompts * int(getattr(params, "n", 1) or 1)
    for name, bound in _BOUNDS.items():
        value = getattr(params, name, None)
        if value and (size := bound.size(value)) * num_answers > bound.most:
            times = f", for each of {num_answers:,} answers" if num_answers > 1 else ""
            return name, (
                f"`{name}` has {size:,} {bound.what}{times}; the bound is {bound.most:,}, because "
                "the work is done for each token."
            )
    return None


class BytesInFlight:
    """Bodies of HTTP requests, each counted from its first byte to the end of its answer.

    ``max_bytes`` may change at any time. For the event loop.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._of_keys: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._of_keys.total()

    @contextlib.contextmanager
    def holding(self, key_id: str) -> Iterator[BodyHolding]:
        """Hold bytes for one request of a key ("" without one) during the context."""
        holding = BodyHolding(self, key_id)
        try:
            with body_holding.holding(holding):
                yield holding
        finally:
            self._of_keys[key_id] -= holding.num_bytes
            if not self._of_keys[key_id]:
                del self._of_keys[key_id]

    def take(self, holding: BodyHolding, num_bytes: int) -> None:
        """Add bytes to a request's share.

        Raises ApiError: 413 if the share could never be granted, 429 if not now.
        """
        key_id = holding.key_id
        bound = self.bound_of(key_id)
        if holding.num_bytes + num_bytes > bound:
            raise ApiError(
                413,
                "The request body, counted `n` times, with what its answer needs, is larger than "
                f"the {bound:,} bytes that may be in flight at once.",
            )
        of_key = self._of_keys[key_id] + num_bytes
        if of_key > bound or self.num_bytes + num_bytes > self.max_bytes:
            full_bytes = bound if of_key > bound else self.max_bytes
            raise over_rate(
                f"The requests in flight have nearly {full_bytes:,} bytes already: there is no "
                "room for this one now.",
                _RETRY_NO_ROOM_S,
            )
        self._of_keys[key_id] = of_key
        holding.num_bytes += num_bytes

    def bound_of(self, key_id: str) -> int:
        return int(self.max_bytes * KEY_BYTES_SHARE) if key_id else self.max_bytes


class BodyHolding:
    """One request's share of the bytes in flight."""

    def __init__(self, room: BytesInFlight, key_id: str) -> None:
        self._room = room
        self.key_id = key_id
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self._room.take(self, num_bytes)


body_holding: RequestLocal[BodyHolding] = RequestLocal("body_holding")


class RequestIds:
    """The id of one HTTP request, and the ids of its engine requests.

    The server creates its own ids; a client's id is only returned to the client.

    Each HTTP request gets an id of 16 random bytes, sent as ``x-request-id``. Its engine requests
    use that id, the second and later ones with a number appended. A client's own id appears only in
    the client's answer.
    """

    def __init__(self) -> None:
        self.http_id = secrets.token_hex(16)
        self._num_made = 0

    def make(self) -> str:
        self._num_made += 1
        return self.http_id if self._num_made == 1 else f"{self.http_id}-{self._num_made}"


request_ids: RequestLocal[RequestIds] = RequestLocal("request_ids")
answer_name: RequestLocal[str] = RequestLocal("answer_name")
"""The name of the model in the answer: the name in the request, of a model, an alias, a preset or
an adapter.
"""


def make_engine_id() -> str:
    """Return an id for an engine request of the present HTTP request."""
    return (request_ids.get() or RequestIds()).make()


def name_responses(serving: Any) -> None:
    """Give answers of vLLM's Responses API the server's id, where vLLM would take a random one."""
    create = serving.create_responses

    async def create_named(request: Any, *args: Any, **kwargs: Any) -> Any:
        ids = request_ids.get()
        if ids is not None and "request_id" not in request.model_fields_set:
            request.request_id = f"resp_{ids.http_id}"
        return await create(request, *args, **kwargs)

    serving.create_responses = create_named


def name_as_requested(models: Any) -> None:
    """Make vLLM's list of served names return the name in the request.

    vLLM returns the model's name for an alias, and a preset is an alias here.
    """
    name_of: Callable[..., str] = models.model_name
    models.model_name = lambda lora_request=None: answer_name.get() or name_of(lora_request)


def sample_number(engine_id: str) -> int:
    """Return the number of an engine request among the samples of one prompt.

    vLLM puts the number before the id of a request with several samples.
    """
    number, found, _ = engine_id.partition("_")
    return int(number) if found else 0


def check_client_id(value: object, where: str) -> None:
    """Check an id that a client sent; ``where`` names the field or header.

    Raises ApiError: 400; the id is too long, empty, or has other characters than printable ASCII.
    """
    if not isinstance(value, str) or _CLIENT_ID.fullmatch(value) is None:
        raise bad_request(
            f"{where} must be a string of 1 to {MAX_CLIENT_ID_CHARS} printable ASCII "
            "characters without spaces.",
            param="request_id",
        )


def with_id(scope: Scope, ids: RequestIds, *, body_has_id: bool) -> Scope:
    """The same request with an id for the model's API: the client's, or else ours.

    Raises ApiError: 400; the client's header ``X-Request-Id`` is not an id.
    """
    sent = [value for name, value in scope["headers"] if name == _HEADER]
    for value in sent:
        check_client_id(value.decode("latin-1"), "The header `X-Request-Id`")
    if sent or body_has_id:
        return scope
    return {**scope, "headers": [*scope["headers"], (_HEADER, ids.http_id.encode())]}


def sending_id(send: Send, ids: RequestIds) -> Send:
    """Return ``send`` with the server's id added to the headers of an answer."""

    async def send_with_id(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = [
                header for header in message.get("headers", ()) if header[0].lower() != _HEADER
            ]
            message = {**message, "headers": [*headers, (_HEADER, ids.http_id.encode())]}
        await send(message)

    return send_with_id


class BadImage(ValueError):
    """An image cannot be read, or exceeds a bound; the text is for the client."""


def image_size(data: bytes) -> tuple[int, int]:
    """Return width and height from the head of an encoded image, without decoding pixels.

    Raises BadImage: the image has too many bytes or scans, a side too long for the other, or is in
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

        Raises BadImage: the request's images have more than ``max_pixels`` in total.
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
