"""Comments in streams that wait for a first token: the place and the estimated time.

Comments begin after the admission, so a refusal has its own HTTP status, and end with the engine's
first output.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from gpupoold.frontend.mounts import Scope
from gpupoold.wire.messages import AskWaits, RequestProgress, RequestWait, Waits

# Time of the daemon for each waiting request, at most: many requests are told less often.
_SECONDS_EACH = 0.005
_LEAST_INTERVAL_S = 0.5
_TICKS = 4  # in an interval
_HEADER, _OFF = b"x-gpupool-waiting", b"off"


class Stream(Protocol):
    """An answer on its way to a client, see :class:`.client_answer.ClientAnswer`."""

    @property
    def takes_comments(self) -> bool: ...

    def comment(self, text: str) -> None: ...


@dataclass(slots=True)
class _Waiting:
    stream: Stream
    due_s: float
    """Time of the next question to the daemon."""


def wants_comments(scope: Scope) -> bool:
    """Return whether a request does not decline comments with ``X-Gpupool-Waiting: off``."""
    return not any(
        name == _HEADER and value.strip().lower() == _OFF for name, value in scope["headers"]
    )


@dataclass(eq=False)
class WaitComments:
    """Asks the daemon about the waiting streams of this frontend; for the event loop.

    ``interval_s`` may change at any time; 0 means no comments.
    """

    send: Callable[[msgspec.Struct], None]
    interval_s: float
    clock: Callable[[], float] = time.monotonic
    _waiting: dict[str, _Waiting] = field(default_factory=dict, init=False)
    _asking: asyncio.Task[None] | None = field(default=None, init=False)

    def begin(self, request_id: str, stream: Stream) -> None:
        """A request has been admitted."""
        if not self.interval_s:
            return
        self._waiting[request_id] = _Waiting(stream, self.clock() + self._every_s)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())

    def end(self, request_ids: Iterable[str]) -> None:
        """Requests have ended."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    def progressed(self, progress: Iterable[RequestProgress]) -> None:
        """An engine has made outputs."""
        if self._waiting:
            self.end(one.request_id for one in progress)

    def told(self, message: Waits) -> None:
        """Pass the daemon's answer on."""
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
                (name, one)
                for name, one in self._waiting.items()
                if one.due_s <= now_s and one.stream.takes_comments
            ]
            for _, one in due:
                one.due_s = now_s + every_s
            if due:
                self.send(AskWaits([name for name, _ in due]))


def comment_of(wait: RequestWait) -> str:
    """Return the text of a comment."""
    text = "gpupool waiting"
    if wait.place:
        text += f" place={wait.place}"
    if wait.first_token_in_s is not None:
        text += f" estimate_s={wait.first_token_in_s:.1f}"
    return text
