"""Messages about live requests to the frontends of these requests, and the texts of waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus

import msgspec

from gpupoold.control.live_requests import LiveRequest, LiveRequests
from gpupoold.domain import FinalFailure
from gpupoold.scheduling.state import State
from gpupoold.scheduling.wait_estimate import lines_of, waits_of
from gpupoold.wire import messages as m
from gpupoold.wire.messages import GrammarRefused, WrongAnswer


class Replies:
    """Sends admissions, outputs and failures, each to one frontend.

    ``send`` takes a frontend's number and a message; messages of ended requests are dropped.
    """

    def __init__(self, live: LiveRequests, send: Callable[[int, m.Message], None]) -> None:
        self._live = live
        self.send = send

    def outputs(self, message: m.StepOutputs) -> None:
        """Send each frontend its part of one step's outputs."""
        for number, part in parts_of(message, self._frontend_of).items():
            self.send(number, part)

    def failed(
        self, requests: Iterable[LiveRequest], reason: str, final: FinalFailure | None = None
    ) -> None:
        """Report that these live requests end with an error, which may be ``final``."""
        status = HTTPStatus.SERVICE_UNAVAILABLE if final is None else final.status
        ids: dict[tuple[int, str], list[str]] = {}
        for one in requests:
            ids.setdefault((one.frontend, one.model), []).append(one.request_id)
        for (number, model), request_ids in ids.items():
            failed = m.RequestsFailed(model, request_ids, reason, status, final or "")
            self.send(number, failed)

    def _frontend_of(self, request_id: str) -> int | None:
        request = self._live.get(request_id)
        return None if request is None else request.frontend


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


def waits_for(request: LiveRequest, state: State, *, has_hosts: bool) -> str:
    """Return the cause of a request's wait, in words; ``has_hosts``: a worker has the model."""
    if request.is_cold:
        return f"{request.model} is not in host memory yet"
    if request.is_held:
        return "the request may have crashed a worker and waits to be retried alone"
    if not has_hosts:
        return f"no device has {request.model} now"
    if request.device is None:
        return "no device has taken the request"
    device = state.devices.get(request.device)
    if device is None or device.turn is None or device.turn.model != request.model:
        return f"the request waits for the turn of {request.model} on device {request.device}"
    return f"device {request.device} is running the request but does not respond"


def parts_of(
    message: m.StepOutputs, frontend_of: Callable[[str], int | None]
) -> dict[int, m.StepOutputs]:
    """Divide one step's outputs by frontend.

    ``frontend_of`` returns a request's frontend number, None after the request's end.
    """
    progress: dict[int, list[m.RequestProgress]] = {}
    for item in message.progress:
        number = frontend_of(item.request_id)
        if number is not None:
            progress.setdefault(number, []).append(item)
    if len(progress) == 1 and len(message.frame_counts) <= 1:
        return dict.fromkeys(progress, message)
    frames = _frames_by_frontend(message)
    return {
        number: msgspec.structs.replace(
            message, frames=frames.get(number, []), progress=items, frame_counts={}
        )
        for number, items in progress.items()
    }


def _frames_by_frontend(message: m.StepOutputs) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    begin = 0
    for number, count in message.frame_counts.items():
        found[number] = message.frames[begin : begin + count]
        begin += count
    return found


class RequestListener:
    """Takes the dispatcher's reports about a model's requests; this class ignores all reports."""

    def request_began(self, model: str) -> None:
        """Handle the arrival of a request."""

    def request_ended(self, model: str, device: int | None) -> None:
        """Handle the end of a request; ``device`` is None if no device had the request."""

    def weights_wanted(self, model: str) -> None:
        """Handle the wait of a request until the model is warm."""

    def weights_damaged(self, answer: WrongAnswer) -> None:
        """Handle a failed self-check."""

    def grammar_refused(self, refused: GrammarRefused) -> None:
        """Handle a grammar that has exceeded a bound in a worker."""

    def answered(self, model: str) -> None:
        """Handle an end without an error, or progress beyond the token of an earlier crash."""

    def convicted(self, model: str, request_id: str) -> None:
        """Handle the end of a request that crashed a worker when retried alone."""

    def acquitted(self, model: str) -> None:
        """Handle a crash whose suspects are all cleared: the crash counts for the model."""
