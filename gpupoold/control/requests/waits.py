"""Reports the waits of requests without a first token to the frontends that ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gpupoold.control.live_requests import LiveRequests
from gpupoold.scheduling.state import State
from gpupoold.scheduling.waits import lines_of, waits_of
from gpupoold.wire import messages as m


class WaitReports:
    """Answers ``AskWaits``, line by line: other work of the event loop comes between two lines."""

    def __init__(
        self,
        live: LiveRequests,
        state: State,
        send: Callable[[int, m.Message], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``send`` takes a frontend's number and a message."""
        self._live = live
        self._state = state
        self._send = send
        self._clock = clock
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def asked(self, frontend: int, message: m.AskWaits) -> None:
        """Report to a frontend, unless a report is under way."""
        task = self._tasks.get(frontend)
        if task is None or task.done():
            report = self._report(frontend, frozenset(message.request_ids))
            self._tasks[frontend] = asyncio.create_task(report, name="waits")

    async def _report(self, frontend: int, request_ids: frozenset[str]) -> None:
        found = map(self._live.get, request_ids)
        cold = [one.request_id for one in found if one is not None and one.is_cold]
        if cold:
            self._send(frontend, m.Waits([m.RequestWait(one, 0) for one in cold]))
        for line in lines_of(self._state, request_ids):
            waits = [
                m.RequestWait(request_id, *wait)
                for request_id, wait in waits_of(self._state, line, self._clock())
                if request_id in request_ids
            ]
            if waits:
                self._send(frontend, m.Waits(waits))
            await asyncio.sleep(0)
