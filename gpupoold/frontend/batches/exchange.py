"""A request inside the process, in the form of ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, MutableMapping
from typing import Any

import msgspec
from starlette.types import Scope

from gpupoold.frontend.batches.work import JsonAnswer

_MAX_REASON_CHARS = 400
_LEAVING_S = 1.0


class Exchange:
    """One POST of JSON, and its answer."""

    def __init__(self, path: str, body: bytes) -> None:
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"host", b"batch"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
            "client": None,
            "server": None,
            "state": {},
        }
        self._unread: bytes | None = body
        self._is_left = asyncio.Event()
        self._status = 500
        self._retry_after_s = 0.0
        self._pieces: list[bytes] = []

    async def run(self, answering: Coroutine[Any, Any, None]) -> None:
        """Await the application; a cancellation reaches the application as the client's end.

        vLLM's routes let the work go on when only their own task is cancelled.
        """
        task = asyncio.ensure_future(answering)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            self._is_left.set()
            await asyncio.wait([task], timeout=_LEAVING_S)
            task.cancel()
            raise

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the body once, then, when the exchange is left, the end of the connection."""
        if self._unread is None:
            await self._is_left.wait()
            return {"type": "http.disconnect"}
        body, self._unread = self._unread, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Take a part of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            found = dict(message.get("headers", ())).get(b"retry-after", b"")
            self._retry_after_s = float(found) if found.isdigit() else 0.0
        elif message["type"] == "http.response.body":
            self._pieces.append(message.get("body", b""))

    def answer(self, request_id: str) -> JsonAnswer:
        """Return the answer; 500 without one."""
        body = b"".join(self._pieces) or b"null"
        reason = _message_of(body) if self._status >= 400 else ""
        return JsonAnswer(self._status, request_id, body, self._retry_after_s, reason)


class _Refusal(msgspec.Struct):
    message: str


class _RefusalBody(msgspec.Struct):
    error: _Refusal


def _message_of(body: bytes) -> str:
    """Return the message of an error's body, empty if there is none."""
    try:
        return msgspec.json.decode(body, type=_RefusalBody).error.message[:_MAX_REASON_CHARS]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
