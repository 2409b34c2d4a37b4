"""The thread that polls the daemon over one connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpupool_tui.picture import Picture
from gpupoold.api.client import AdminClient
from gpupoold.api.schemas_top import Top
from gpupoold.errors import GpupoolError

_TIMEOUT_S = 5.0
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class PollQuestion:
    """The parts to request in the next answer."""

    turns_after: int
    events_after: int | None
    minutes: bool
    pid: int | None = None
    """Process id of the daemon at the previous question."""

    @classmethod
    def after(cls, picture: Picture) -> PollQuestion:
        pid = None if picture.status is None else picture.status.pid
        return cls(picture.last_turn_id, picture.last_event_id, picture.wants_minutes, pid)


def ask(client: AdminClient, question: PollQuestion) -> Top:
    """Return the daemon's answer; ask a restarted daemon again for all its turns."""
    top = client.top(question.turns_after, question.events_after, minutes=question.minutes)
    if question.pid is None or top.status.pid == question.pid:
        return top
    return client.top(0, question.events_after)


class Poller(threading.Thread):
    """Calls ``on_answer`` with each answer, or ``on_lost`` with the reason for none.

    ``next_question`` None means that no answer is wanted now. All callbacks run in this thread.
    """

    def __init__(
        self,
        socket_path: Path,
        next_question: Callable[[], PollQuestion | None],
        interval_s: Callable[[], float],
        on_answer: Callable[[Top], None],
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__(name="poller", daemon=True)
        self._socket_path = socket_path
        self._next_question = next_question
        self._interval_s = interval_s
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._wake = threading.Event()
        self._is_stopping = False

    def ask_now(self) -> None:
        """Do not wait for the rest of the interval."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread, which may be waiting for an answer."""
        self._is_stopping = True
        self._wake.set()

    def run(self) -> None:
        with AdminClient(self._socket_path, _TIMEOUT_S) as client:
            while not self._is_stopping:
                began_s = time.monotonic()
                wait_s = self._interval_s() if self._once(client) else _RETRY_S
                self._wake.wait(max(0.0, wait_s - (time.monotonic() - began_s)))
                self._wake.clear()

    def _once(self, client: AdminClient) -> bool:
        question = self._next_question()
        if question is None:
            return True
        try:
            top = ask(client, question)
        except GpupoolError as error:
            if not self._is_stopping:
                self._on_lost(error.message)
            return False
        if not self._is_stopping:
            self._on_answer(top)
        return True
