"""The messages of an answer on their way to the client; how its request waited; traces of requests.

A stream's headers are sent with its first event, and then tell how the request waited. A stream
whose request waits longer gets its headers with the first comment, and a last comment with the same
facts before its first event. A comment of server-sent events is a line that begins with a colon,
which clients ignore.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Scope, Send

from gpupoold.frontend.errors import ApiError
from gpupoold.wire.continuation import TOKENS_COMMENT, OutputSoFar
from gpupoold.wire.messages import FirstToken

_FACTS = ("device", "load-ms", "queue-ms", "switch-ms", "prefill-ms", "cached-tokens")
FACT_HEADERS = tuple(f"x-gpupool-{name}" for name in _FACTS)
"""All headers that tell how a request waited."""

_STAGES = ("load", "queue", "switch", "prefill")
_NS_PER_MS = 1_000_000
_SERVER_ERROR = 500


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
            f": {TOKENS_COMMENT} {number} {','.join(map(str, output.token_ids))} "
            f"{output.finish_reason or ''}\n\n"
            for number, output in untold.items()
            if output.token_ids
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


@dataclass(eq=False)
class TracedRequest:
    """A request under way; ``answer`` is set when there is one."""

    model: str = ""
    answer: ClientAnswer | None = None
    status: int = 0
    """The status of a refusal, 0 without."""


class Traces:
    """Sends a span per HTTP request to an OTLP/HTTP collector, from a thread of its own.

    The span of a request continues the trace of the client's header ``traceparent`` (W3C trace
    context). The stages are those of the header ``x-gpupool-queue-ms`` and its like: the daemon
    tells the times of scheduling and of the worker with the first token. Spans contain no text of a
    prompt or an answer.
    """

    def __init__(self, endpoint: str, share: float = 1.0) -> None:
        """Record ``share`` of the requests without a trace of their own.

        ``endpoint`` is the URL of the collector, such as ``http://127.0.0.1:4318/v1/traces``; empty
        for no traces.
        """
        self._tracer: Any = None
        self._propagator: Any = None
        if endpoint:
            self._start(endpoint, share)

    @contextlib.contextmanager
    def request(self, scope: Scope, request_id: str) -> Iterator[TracedRequest]:
        traced = TracedRequest()
        if self._tracer is None:
            yield traced
            return
        span = self._begin(scope)
        span.set_attribute("gpupool.request_id", request_id)
        try:
            yield traced
        except ApiError as error:
            traced.status = error.status
            raise
        finally:
            self._end(span, traced)

    def _start(self, endpoint: str, share: float) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "gpupool"})
        provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(share), resource=resource, shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=5)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = provider.get_tracer("gpupool")
        self._propagator = TraceContextTextMapPropagator()

    def _begin(self, scope: Scope) -> Any:
        from opentelemetry.trace import SpanKind

        names = ("traceparent", "tracestate")
        headers = ((key.decode("latin-1"), value) for key, value in scope["headers"])
        carrier = {name: value.decode("latin-1") for name, value in headers if name in names}
        return self._tracer.start_span(
            f"{scope['method']} {scope['path']}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "http.route": scope["path"]},
        )

    def _end(self, span: Any, traced: TracedRequest) -> None:
        from opentelemetry.trace import StatusCode

        end_ns, answer = time.time_ns(), traced.answer
        if traced.model:
            span.set_attribute("gen_ai.request.model", traced.model)
        status = traced.status or (0 if answer is None else answer.status)
        if status:
            span.set_attribute("http.response.status_code", status)
        if status >= _SERVER_ERROR:
            span.set_status(StatusCode.ERROR)
        if answer is not None and answer.first_token_ns:
            self._add_stages(span, answer, end_ns)
        span.end(end_ns)

    def _add_stages(self, span: Any, answer: ClientAnswer, end_ns: int) -> None:
        """Add spans of the stages, which end with the first token, and of the rest."""
        from opentelemetry.trace import set_span_in_context

        context, facts = set_span_in_context(span), answer.facts
        for name in ("device", "cached-tokens"):
            if name in facts:
                span.set_attribute(f"gpupool.{name.replace('-', '_')}", facts[name])
        durations_ns = {stage: facts.get(f"{stage}-ms", 0) * _NS_PER_MS for stage in _STAGES}
        at_ns = answer.first_token_ns - sum(durations_ns.values())
        spans = [*durations_ns.items(), ("decode", max(0, end_ns - answer.first_token_ns))]
        for stage, duration_ns in spans:
            if duration_ns:
                child = self._tracer.start_span(stage, context=context, start_time=at_ns)
                child.end(at_ns + duration_ns)
            at_ns += duration_ns
