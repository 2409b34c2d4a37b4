"""Traces of requests for OpenTelemetry: a span per HTTP request, with the stages of its answer.

The span of a request continues the trace of the client's header ``traceparent`` (W3C trace
context). The stages are those of the header ``x-gpupool-queue-ms`` and its like: the daemon tells
the times of scheduling and of the worker with the first token. Spans contain no text of a prompt or
an answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpupoold.frontend.client_answer import ClientAnswer
from gpupoold.frontend.errors import ApiError
from gpupoold.frontend.mounts import Scope

_STAGES = ("load", "queue", "switch", "prefill")
_NS_PER_MS = 1_000_000
_SERVER_ERROR = 500


@dataclass(eq=False)
class TracedRequest:
    """A request under way; ``answer`` is set when there is one."""

    model: str = ""
    answer: ClientAnswer | None = None
    status: int = 0
    """The status of a refusal, 0 without."""


class Traces:
    """Sends spans to an OTLP/HTTP collector from a thread of its own; off without ``endpoint``."""

    def __init__(self, endpoint: str, share: float = 1.0) -> None:
        """Record ``share`` of the requests without a trace of their own.

        ``endpoint`` is the URL of the collector, such as ``http://127.0.0.1:4318/v1/traces``.
        """
        self._tracer: Any = None
        self._propagator: Any = None
        if endpoint:
            self._start(endpoint, share)

    @contextlib.contextmanager
    def request(self, scope: Scope, request_id: str) -> Iterator[TracedRequest]:
        """Record the request inside the context."""
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
