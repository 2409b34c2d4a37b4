"""Output that is held back: until the daemon has admitted the requests, and to keep a steady pace.

A model's API begins to stream before its engine has the request, so a refusal would come after "200
OK". The gate of an HTTP request keeps the API's output until the daemon has answered; after a
refusal the client gets the refusal instead.

A gate's requests (several for ``n`` > 1 or a list of prompts) find the gate by the context of the
API's task, which new tasks inherit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from starlette.types import Scope, Send

from gpupoold.frontend.client_answer import ClientAnswer
from gpupoold.frontend.errors import ApiError, not_understood
from gpupoold.frontend.request_context import RequestLocal, sample_number
from gpupoold.stats.histogram import Histogram
from gpupoold.units import OFF, gap_s_of
from gpupoold.wire import messages

_logger = logging.getLogger(__name__)
# Seconds after which a client may repeat a request that a stopping server has ended. Connections
# wait in the socket until the server has started again.
_RETRY_AFTER = b"1"

# Time of the daemon for each waiting request, at most: many requests are told less often.
_SECONDS_EACH = 0.005
_LEAST_INTERVAL_S = 0.5
_TICKS = 4  # in an interval
_COMMENTS_HEADER, _OFF = b"x-gpupool-waiting", b"off"

_PACE_HEADER = b"x-gpupool-pace"
wanted_pace: RequestLocal[float] = RequestLocal("pace")
"""The gap between two tokens of a request's streams in seconds, None for no pace."""


class Gate:
    """Holds one answer back; ``send`` is for the model's API."""

    def __init__(
        self,
        send: Send,
        is_stopping: Callable[[], bool] = lambda: False,
        *,
        wants_comments: bool = False,
        tells_tokens: bool = False,
    ) -> None:
        self.wants_comments = wants_comments
        self.answer = ClientAnswer(send, waits=wants_comments, tells_tokens=tells_tokens)
        self._is_stopping = is_stopping
        self.request_ids: list[str] = []  # of the answer
        self._num_unanswered = 0
        self._is_open = False
        self._is_passing = False
        self._held: list[MutableMapping[str, Any]] = []
        self._sending = asyncio.Lock()
        self._opening: asyncio.Task[None] | None = None
        self.refusal: ApiError | None = None

    @property
    def is_untouched(self) -> bool:
        """True if the daemon got no request and the client no output."""
        return not self.request_ids and not self._is_open

    @property
    def has_begun(self) -> bool:
        """True if the client gets the API's output: there is some, and the gate is open."""
        return self._is_open and (bool(self._held) or self.answer.has_begun)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Pass on a message of the answer, or keep it; drop it after a refusal."""
        if self.refusal is not None:
            return
        if message.get("status") == HTTPStatus.SERVICE_UNAVAILABLE and self._is_stopping():
            headers = [*message.get("headers", ()), (b"retry-after", _RETRY_AFTER)]
            message = {**message, "headers": headers}
        if self._is_passing:
            await self.answer.send(message)
            return
        self._held.append(message)
        if not message.get("more_body") and message["type"] == "http.response.body":
            self._is_open = True  # a complete answer needs no further message
        if self._is_open:
            await self._flush()

    async def settle(self) -> None:
        """Return when all output has been sent, after the API's end.

        Raises ApiError: the request was refused; no output has been sent.
        """
        if self._opening is not None:
            await self._opening
        if self.refusal is not None:
            raise self.refusal

    def asked(self, request_id: str) -> None:
        self.request_ids.append(request_id)
        self._num_unanswered += 1

    def answered(self, message: messages.AdmissionAnswer) -> list[str]:
        """Handle the daemon's answer; return the requests to end after a refusal."""
        self._num_unanswered -= 1
        if self.refusal is None:
            if message.status == HTTPStatus.OK:
                if not self._num_unanswered and not self._is_open:
                    self._is_open = True
                    self._opening = asyncio.create_task(self._flush())
                return []
            if self.has_begun:
                return [message.request_id]
            self.refusal = ApiError(
                message.status, message.message, retry_after_s=message.retry_after_s
            )
        return self.request_ids

    async def _flush(self) -> None:
        async with self._sending:
            while self._held:
                await self.answer.send(self._held.pop(0))
            # No earlier message is left for a later message to overtake.
            self._is_passing = True


_current: RequestLocal[Gate] = RequestLocal("gate")


def refuse(error: ApiError) -> None:
    """Answer with ``error`` instead of the API's output, unless the answer has begun."""
    gate = _current.get()
    if gate is not None and not gate.has_begun and gate.refusal is None:
        gate.refusal = error


def has_asked() -> bool:
    """Return whether the daemon has been asked for anything for the answer being made."""
    gate = _current.get()
    return gate is not None and not gate.is_untouched


class Gates:
    """The gates of all waiting answers; for the event loop."""

    def __init__(self, waits: WaitComments) -> None:
        self._waits = waits
        self._waiting: dict[str, Gate] = {}  # for the daemon's answer
        self._admitted: dict[str, ClientAnswer] = {}
        self._telling: dict[str, ClientAnswer] = {}  # their tokens
        self._is_stopping = False

    def stop(self) -> None:
        """Add ``Retry-After`` to each 503 of an API from now on, because the server stops."""
        self._is_stopping = True

    @property
    def may_comment(self) -> bool:
        """True if waiting streams get comments."""
        return self._waits.interval_s > 0

    @contextlib.asynccontextmanager
    async def holding(
        self, send: Send, *, wants_comments: bool, tells_tokens: bool = False
    ) -> AsyncIterator[Gate]:
        """Create a gate for the context and its tasks.

        ``wants_comments``: a waiting stream gets comments. ``tells_tokens``: see
        :class:`.client_answer.ClientAnswer`. Raises ApiError: at the end, without any output: a
        request was refused, or the API failed before adding a request, which is the request's
        fault.
        """
        gate = Gate(
            send,
            lambda: self._is_stopping,
            wants_comments=wants_comments,
            tells_tokens=tells_tokens,
        )
        try:
            with _current.holding(gate):
                yield gate
        except Exception as error:
            if gate.is_untouched:
                _logger.info("an API failed before adding a request", exc_info=error)
                raise not_understood(error) from error
            if gate.refusal is None:
                raise
        finally:
            self._waits.end(gate.request_ids)
            for request_id in gate.request_ids:
                self._admitted.pop(request_id, None)
                self._telling.pop(request_id, None)
        await gate.settle()

    def asked(self, request_id: str) -> None:
        gate = _current.get()
        if gate is not None:
            gate.asked(request_id)
            self._waiting[request_id] = gate
            if gate.answer.tells_tokens:
                self._telling[request_id] = gate.answer

    def answered(self, message: messages.AdmissionAnswer) -> list[str]:
        """Handle the daemon's answer; return the requests to end after a refusal."""
        gate = self._waiting.pop(message.request_id, None)
        if gate is not None:
            if message.status == HTTPStatus.OK:
                self._admitted[message.request_id] = gate.answer
                if gate.wants_comments:
                    self._waits.begin(message.request_id, gate.answer)
            return gate.answered(message)
        return [] if message.status == HTTPStatus.OK else [message.request_id]

    def progressed(self, progress: Iterable[messages.RequestProgress]) -> None:
        if self._telling:
            for item in progress:
                if (answer := self._telling.get(item.request_id)) is not None:
                    number = sample_number(item.request_id)
                    answer.note_tokens(number, item.new_token_ids, item.finish_reason)

    def first_tokens(self, message: messages.FirstTokens) -> None:
        for first in message.requests:
            answer = self._admitted.get(first.request_id)
            if answer is not None:
                answer.note(first)

    def prefilled(self, request_id: str, num_cached_tokens: int) -> None:
        """Tell an answer how much of its request's prompt was in the prefix cache."""
        answer = self._admitted.get(request_id)
        if answer is not None:
            answer.note_cached(num_cached_tokens)


@dataclass(slots=True)
class _Waiting:
    stream: ClientAnswer
    due_s: float
    """Time of the next question to the daemon."""


def wants_comments(scope: Scope) -> bool:
    """Return whether a request does not decline comments with ``X-Gpupool-Waiting: off``."""
    return not any(
        name == _COMMENTS_HEADER and value.strip().lower() == _OFF
        for name, value in scope["headers"]
    )


@dataclass(eq=False)
class WaitComments:
    """Asks the daemon about the waiting streams of this frontend; for the event loop.

    Comments begin after the admission, so a refusal has its own HTTP status, and end with the
    engine's first output. ``interval_s`` may change at any time; 0 means no comments.
    """

    send: Callable[[msgspec.Struct], None]
    interval_s: float
    clock: Callable[[], float] = time.monotonic
    _waiting: dict[str, _Waiting] = field(default_factory=dict, init=False)
    _asking: asyncio.Task[None] | None = field(default=None, init=False)

    def begin(self, request_id: str, stream: ClientAnswer) -> None:
        if not self.interval_s:
            return
        self._waiting[request_id] = _Waiting(stream, self.clock() + self._every_s)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())

    def end(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    def progressed(self, progress: Iterable[messages.RequestProgress]) -> None:
        if self._waiting:
            self.end(item.request_id for item in progress)

    def told(self, message: messages.Waits) -> None:
        for wait in message.waits:
            waiting = self._waiting.get(wait.request_id)
            if waiting is not None:
                waiting.stream.comment(comment_of(wait))

    @property
    def _every_s(self) -> float:
        """The time between two comments of a stream."""
        interval_s = max(self.interval_s, _LEAST_INTERVAL_S)
        return max(interval_s, _SECONDS_EACH * len(self._waiting))

    async def _ask(self) -> None:
        """Ask about the streams that are due, as long as requests wait."""
        while self._waiting and self.interval_s:
            await asyncio.sleep(self._every_s / _TICKS)
            now_s, every_s = self.clock(), self._every_s
            due = [
                (name, waiting)
                for name, waiting in self._waiting.items()
                if waiting.due_s <= now_s and waiting.stream.takes_comments
            ]
            for _, waiting in due:
                waiting.due_s = now_s + every_s
            if due:
                self.send(messages.AskWaits([name for name, _ in due]))


def comment_of(wait: messages.RequestWait) -> str:
    text = "gpupool waiting"
    if wait.place:
        text += f" place={wait.place}"
    if wait.first_token_in_s is not None:
        text += f" estimate_s={wait.first_token_in_s:.1f}"
    return text


class Output(Protocol):
    """Some tokens of a request, see ``EngineCoreOutput``."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: Any


def wanted_gap_s(scope: Scope, *defaults: str) -> float | None:
    """Return the gap between two tokens wanted by a request, None for no pace.

    The header ``X-Gpupool-Pace`` has a pace; without one the first of ``defaults`` that is not
    empty holds. See :func:`gap_s_of`. Raises ApiError: 400: the header has another value.
    """
    values = [value for name, value in scope["headers"] if name == _PACE_HEADER]
    if not values:
        return gap_s_of(next((text for text in defaults if text), OFF))
    try:
        return gap_s_of(values[-1].decode("latin-1"))
    except ValueError as error:
        message = f"X-Gpupool-Pace: {error}."
        kind = "invalid_request_error"
        raise ApiError(400, message, kind=kind, param="X-Gpupool-Pace") from None


@dataclass(slots=True)
class _Paced:
    gap_s: float
    due_s: float = -math.inf
    """Time when the next token may be released."""
    released_s: float | None = None
    """Time when the latest token was released."""
    waiting: deque[Output] = field(default_factory=deque)
    timer: asyncio.TimerHandle | None = None


class Pacer:
    """Holds outputs of paced streams of one model; for the event loop.

    A model's turns make tokens faster than a client needs, and pauses lie between two turns. A
    paced stream hands on its first token at once and each further token when a gap has passed since
    the previous token. Tokens waiting here cover the pauses. The gap is at most the model's TBT
    target, so that a token made in time is released in time.

    ``release`` gets outputs when due. ``max_gap_s`` is the model's TBT target.
    """

    def __init__(self, release: Callable[[list[Output]], None], max_gap_s: float) -> None:
        self._release = release
        self._max_gap_s = max_gap_s
        self._paced: dict[str, _Paced] = {}
        self._gaps = Histogram()

    @property
    def is_active(self) -> bool:
        return bool(self._paced)

    def take_gaps(self) -> Histogram:
        """Return the times between released tokens since the last call."""
        gaps, self._gaps = self._gaps, Histogram()
        return gaps

    def begin(self, request_id: str) -> None:
        """Pace a request before its departure, if the context wants a pace."""
        gap_s = wanted_pace.get()
        if gap_s is not None:
            self._paced[request_id] = _Paced(min(gap_s, self._max_gap_s))

    def hold(self, outputs: list[Output]) -> list[Output]:
        """Return the outputs due now; ``release`` gets the rest later."""
        return [output for output in outputs if not self._has_held(output)]

    def end(self, request_ids: Iterable[str]) -> None:
        """Forget ended requests, and drop their waiting outputs."""
        for request_id in request_ids:
            paced = self._paced.pop(request_id, None)
            if paced is not None and paced.timer is not None:
                paced.timer.cancel()

    def _has_held(self, output: Output) -> bool:
        paced = self._paced.get(output.request_id)
        if paced is None:
            return False
        now_s = asyncio.get_running_loop().time()
        if not paced.waiting and now_s >= paced.due_s:
            self._count(paced, output, now_s)
            return False
        paced.waiting.append(output)
        self._set_timer(output.request_id, paced)
        return True

    def _count(self, paced: _Paced, output: Output, now_s: float) -> None:
        """Plan the token after an output released now."""
        # From the planned time on: late timers must not slow the stream down.
        since_s = paced.due_s if now_s - paced.due_s < paced.gap_s else now_s
        num_tokens = len(output.new_token_ids)
        paced.due_s = since_s + paced.gap_s * max(1, num_tokens)
        if num_tokens:
            if paced.released_s is not None:
                self._gaps.add(now_s - paced.released_s)
            if num_tokens > 1:
                self._gaps.add_many(0.0, num_tokens - 1)
            paced.released_s = now_s
        if output.finish_reason is not None:
            self._paced.pop(output.request_id, None)

    def _set_timer(self, request_id: str, paced: _Paced) -> None:
        if paced.timer is None:
            loop = asyncio.get_running_loop()
            paced.timer = loop.call_at(paced.due_s, self._release_next, request_id)

    def _release_next(self, request_id: str) -> None:
        paced = self._paced[request_id]
        paced.timer = None
        output = paced.waiting.popleft()
        self._count(paced, output, asyncio.get_running_loop().time())
        self._release([output])
        if paced.waiting:
            self._set_timer(request_id, paced)
