"""A tiny ASGI client and application for tests of pure ASGI code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.types import Receive, Scope, Send

from gpupoold.frontend.router import ROUTED_PATHS
from gpupoold.stats.histogram import Histogram
from gpupoold.wire.messages import StepOutputs


@dataclass
class Answer:
    """What an application sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


async def request(
    app: Any,
    method: str,
    path: str,
    chunks: Iterable[bytes] = (b"",),
    headers: Iterable[tuple[bytes, bytes]] = (),
    *,
    leave_early: bool = False,
    stall: bool = False,
) -> Answer:
    """Send one request; afterwards (or, with ``leave_early``, instead of the end) disconnect, or
    with ``stall`` send nothing any more."""
    parts = list(chunks)
    messages: list[dict[str, Any]] = [
        {
            "type": "http.request",
            "body": part,
            "more_body": leave_early or stall or i < len(parts) - 1,
        }
        for i, part in enumerate(parts)
    ]
    messages.append({"type": "http.disconnect"})
    answer = Answer()

    async def receive() -> MutableMapping[str, Any]:
        if stall and len(messages) == 1:
            await asyncio.Event().wait()
        return messages.pop(0) if len(messages) > 1 else messages[0]

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            answer.body += message["body"]

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
    await app(scope, receive, send)
    return answer


class EchoApi:
    """A ``ModelApi`` that answers with its label and the body, and records what it is told."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.pushed: list[StepOutputs] = []
        self.failed: list[tuple[list[str], str]] = []
        self.stopped_because = ""
        self.closed = False
        self.seen_after_body: str = ""
        self.responses: set[str] = set()
        self.paced_gaps = Histogram()
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def paths(self) -> frozenset[str]:
        """All served paths."""
        return ROUTED_PATHS

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Echo once the gate is open."""
        body = (await receive()).get("body", b"")
        await self.gate.wait()
        if b"explode" in body:
            raise RuntimeError("explode")
        self.seen_after_body = (await receive())["type"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.label.encode() + b":" + body})

    def push(self, outputs: StepOutputs) -> None:
        """Record outputs."""
        self.pushed.append(outputs)

    def fail(
        self, request_ids: Iterable[str], message: str, status: HTTPStatus, code: str = ""
    ) -> None:
        """Record failures."""
        self.failed.append((list(request_ids), message))

    def stop(self, message: str) -> None:
        """Record the reason."""
        self.stopped_because = message

    def openapi(self) -> dict[str, Any]:
        """One path that is served and one that is not."""
        operation: dict[str, Any] = {"post": {"responses": {}}}
        return {"paths": {"/v1/completions": operation, "/sleep": operation}}

    def owns_response(self, response_id: str) -> bool:
        """Return whether the test put it there."""
        return response_id in self.responses

    def take_paced_gaps(self) -> Histogram:
        """Return the gaps that the test put there."""
        gaps, self.paced_gaps = self.paced_gaps, Histogram()
        return gaps

    def close(self) -> None:
        """Record it."""
        self.closed = True
