"""The messages of an answer on their way to the client, and how its request waited.

A stream's headers are sent with its first event, and then tell how the request waited. A stream
whose request waits longer gets its headers with the first comment, and a last comment with the same
facts before its first event. A comment of server-sent events is a line that begins with a colon,
which clients ignore.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterable, MutableMapping
from typing import Any

import msgspec

from gpupoold.frontend.mounts import Send
from gpupoold.wire.continuation import TOKENS_COMMENT, OutputSoFar
from gpupoold.wire.messages import AdmissionAnswer, FirstToken, ModelList, RequestsFailed

Message = MutableMapping[str, Any]

_FACTS = ("device", "load-ms", "queue-ms", "switch-ms", "prefill-ms", "cached-tokens")
FACT_HEADERS = tuple(f"x-gpupool-{name}" for name in _FACTS)
"""All headers that tell how a request waited."""

_PATH, _ADDRESS = "<path>", "<address>"
_HIDDEN = (
    # Quoted, in which a path may have spaces.
    (re.compile(r"(['\"`])(?:file://)?~?/[^'\"`\n]*\1"), rf"\1{_PATH}\1"),
    (re.compile(r"\bfile://[^\s'\"`<>]*"), _PATH),
    (re.compile(r"\b(?:tcp|ipc|unix|inproc)://[^\s'\"`<>]*"), _ADDRESS),
    (re.compile(r"(?<![\w./~<-])~?/(?!/)[^\s'\"`<>()\[\],;:]+"), _PATH),
    (re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?![\w.])"), _ADDRESS),
    (re.compile(r" at 0x[0-9a-fA-F]+"), ""),
)
_API_PATH = re.compile(r"/(?:v1|health|ready|version|metrics)(?:/|$)")


class ClientAnswer:
    """One answer; ``send`` takes the API's messages, ``comment`` the comments of a wait."""

    def __init__(self, send: Send, *, waits: bool, tells_tokens: bool = False) -> None:
        """``waits``: headers of a stream wait for its first event, and comments may be sent.
        ``tells_tokens``: the events of a stream come with the ids of their tokens.
        """
        self.status = 0
        """The HTTP status, 0 before the headers."""
        self.first_token_ns = 0
        """Wall-clock time of the first token, 0 before."""
        self._client_send = send
        self._waits = waits
        self._start: Message | None = None  # held back
        self._is_event_stream = False  # and has not ended
        self.tells_tokens = tells_tokens
        self._untold: dict[int, OutputSoFar] = {}
        self.facts: dict[str, int] = {}
        """How the answer's request waited, by the names of the headers; empty before a token."""
        self._are_facts_told = False
        self._lock = asyncio.Lock()
        self._commenting: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        """True from the first message of the API."""
        return bool(self.status) or self._start is not None

    @property
    def takes_comments(self) -> bool:
        """True from the headers of a stream of events to its end."""
        return self._waits and self._is_event_stream

    def note(self, first: FirstToken) -> None:
        """A request of the answer has its first token; the first such request counts."""
        if "device" not in self.facts:
            self.first_token_ns = time.time_ns()
            self.facts |= facts_of(first)

    def note_cached(self, num_tokens: int) -> None:
        """So many tokens of a request's prompt were in the prefix cache."""
        self.facts.setdefault("cached-tokens", num_tokens)

    def note_tokens(self, number: int, token_ids: Iterable[int], finish_reason: str | None) -> None:
        """An engine has made these tokens of a sample of the answer, and perhaps ended it."""
        output = self._untold.setdefault(number, OutputSoFar())
        output.token_ids += token_ids
        output.finish_reason = finish_reason

    async def send(self, message: Message) -> None:
        """Pass a message of the API on, or hold headers back."""
        if not self._waits:
            await self._pass_on(message)
            return
        async with self._lock:
            if message["type"] == "http.response.start" and _has_events(message):
                self._start, self._is_event_stream = message, True
                return
            await self._send_start()
            await self._tell_facts()
            await self._pass_on(message)

    def comment(self, text: str) -> None:
        """Send a comment to a client that reads server-sent events.

        The comment is dropped while an earlier one is being sent, because the client reads slowly.
        """
        is_sending = self._commenting is not None and not self._commenting.done()
        if self.takes_comments and not is_sending:
            self._commenting = asyncio.create_task(self._comment(text))

    async def _comment(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the client has left, and the API learns of it too
            async with self._lock:
                if self._is_event_stream:
                    await self._send_start()
                    await self._send_comment(text)

    async def _send_start(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            await self._pass_on(start)

    async def _tell_facts(self) -> None:
        """Send facts that the headers did not have."""
        if self._is_event_stream and self.facts and not self._are_facts_told:
            self._are_facts_told = True
            shown = (f"{name.replace('-', '_')}={value}" for name, value in self.facts.items())
            await self._send_comment(f"gpupool {' '.join(shown)}")

    async def _send_comment(self, text: str) -> None:
        body = f": {text}\n\n".encode()
        await self._client_send({"type": "http.response.body", "body": body, "more_body": True})

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._is_event_stream = self._is_event_stream or _has_events(message)
            message = self._with_facts(message)
        else:
            if self._untold and self._is_event_stream:
                message = {**message, "body": self._tokens() + message.get("body", b"")}
            if not message.get("more_body"):
                self._is_event_stream = False
        await self._client_send(message)

    def _tokens(self) -> bytes:
        """Return comments with the tokens of each sample since the last comments."""
        untold, self._untold = self._untold, {}
        lines = (
            f": {TOKENS_COMMENT} {number} {','.join(map(str, one.token_ids))} "
            f"{one.finish_reason or ''}\n\n"
            for number, one in untold.items()
            if one.token_ids
        )
        return "".join(lines).encode()

    def _with_facts(self, start: Message) -> Message:
        if not self.facts:
            return start
        self._are_facts_told = True
        facts = self.facts.items()
        added = [(b"x-gpupool-" + name.encode(), b"%d" % value) for name, value in facts]
        return {**start, "headers": [*start.get("headers", ()), *added]}


def facts_of(first: FirstToken) -> dict[str, int]:
    """Return the device and the stages of the time to the first token, in milliseconds."""
    stages = {
        "load-ms": first.loading_s,
        "queue-ms": first.queueing_s,
        "switch-ms": first.switching_s,
        "prefill-ms": first.computing_s,
    }
    return {"device": first.device} | {name: round(1e3 * each) for name, each in stages.items()}


def _has_events(start: Message) -> bool:
    headers: Iterable[tuple[bytes, bytes]] = start.get("headers", ())
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )


def for_clients(text: str) -> str:
    """Return a reason with ``<path>`` and ``<address>`` for those of this machine.

    Reasons come from exceptions in all processes, with paths and addresses of this machine.
    Operators read the whole text in ``gpupool events``, ``gpupool ps`` and the logs.
    """
    for pattern, shown in _HIDDEN:
        text = pattern.sub(lambda found, shown=shown: _shown(found, shown), text)  # type: ignore[misc]
    return text


def _shown(found: re.Match[str], shown: str) -> str:
    return found[0] if _API_PATH.match(found[0]) else found.expand(shown)


def fit_for_clients(message: Any) -> Any:
    """Return a message of the daemon, whose texts for clients name no detail of the server."""
    match message:
        case AdmissionAnswer() | RequestsFailed():
            return msgspec.structs.replace(message, message=for_clients(message.message))
        case ModelList():
            models = [
                msgspec.structs.replace(model, reason=for_clients(model.reason))
                for model in message.models
            ]
            return msgspec.structs.replace(message, models=models)
        case _:
            return message
