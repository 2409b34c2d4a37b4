"""Steady streams: tokens of an engine's bursts are released evenly.

A model's turns make tokens faster than a client needs, and pauses lie between two turns. A paced
stream hands on its first token at once and each further token when a gap has passed since the
previous token. Tokens waiting here cover the pauses. The gap is at most the model's TBT target, so
that a token made in time is released in time.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpupoold.frontend.errors import ApiError
from gpupoold.frontend.mounts import Scope
from gpupoold.frontend.request_bounds import RequestLocal
from gpupoold.stats.histogram import Histogram
from gpupoold.units import OFF, gap_s_of

_HEADER = b"x-gpupool-pace"
wanted_pace: RequestLocal[float] = RequestLocal("pace")
"""The gap between two tokens of a request's streams in seconds, None for no pace."""


class Output(Protocol):
    """Some tokens of a request, see ``EngineCoreOutput``."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: Any


def wanted_gap_s(scope: Scope, *defaults: str) -> float | None:
    """Return the gap between two tokens wanted by a request, None for no pace.

    The header ``X-Gpupool-Pace`` has a pace; without one the first of ``defaults`` that is not
    empty holds. See :func:`gap_s_of`.

    Raises:
        ApiError: 400: the header has another value.
    """
    values = [value for name, value in scope["headers"] if name == _HEADER]
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

    ``release`` gets outputs when due. ``max_gap_s`` is the model's TBT target.
    """

    def __init__(self, release: Callable[[list[Output]], None], max_gap_s: float) -> None:
        self._release = release
        self._max_gap_s = max_gap_s
        self._paced: dict[str, _Paced] = {}
        self._gaps = Histogram()

    @property
    def is_active(self) -> bool:
        """True if there are paced streams."""
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
