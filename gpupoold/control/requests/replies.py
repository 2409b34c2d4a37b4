"""Messages about live requests to the frontends of these requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus

import msgspec

from gpupoold.control.live_requests import LiveRequest, LiveRequests
from gpupoold.domain import FinalFailure
from gpupoold.wire import messages as m


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
