"""Traces of requests, as a collector receives them by OTLP over HTTP."""

from __future__ import annotations

import gzip
import itertools
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.checkpoints.dummy import make_dummy_checkpoint
from tests.functional.daemon_tools import private_daemon, until

MODEL = "traced"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A small OTLP collector; ``spans`` has the spans received."""

    def __init__(self) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                message = ExportTraceServiceRequest.FromString(body)
                for resource in message.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self.spans: list[Any] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def of_trace(self, trace_id: str) -> dict[str, Any]:
        found = [one for one in self.spans if one.trace_id.hex() == trace_id]
        return {one.name: one for one in found}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def box(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateDaemon]:
    folder = tmp_path_factory.mktemp("traces")
    path = make_dummy_checkpoint(folder, "Qwen2.5-7B")
    config = f'devices = ["sim:H800"]\n[traces]\nendpoint = "{collector.url}"\n'
    with private_daemon(config, folder / "pool") as daemon:
        daemon.add_model(MODEL, path, max_model_len=4096)
        yield daemon


def attributes(span: Any) -> dict[str, Any]:
    values = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        values[one.key] = getattr(one.value, kind)
    return values


def ask(box: PrivateDaemon, trace_id: str, **fields: Any) -> httpx.Response:
    headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01", "authorization": "Bearer secret"}
    body = {"model": MODEL, "prompt": "top secret words", "max_tokens": 20} | fields
    return httpx.post(f"{box.http_url}/v1/completions", json=body, headers=headers, timeout=60)


def test_a_request_is_a_span_with_its_stages(box: PrivateDaemon, collector: Collector) -> None:
    answer = ask(box, TRACE_ID)
    assert answer.status_code == 200
    until(lambda: "decode" in collector.of_trace(TRACE_ID))
    spans = collector.of_trace(TRACE_ID)
    whole = spans.pop("POST /v1/completions")
    assert whole.parent_span_id.hex() == PARENT_ID
    told = attributes(whole)
    assert told["gen_ai.request.model"] == MODEL
    assert told["http.response.status_code"] == 200
    assert told["gpupool.device"] == 0
    assert answer.json()["id"].endswith(told["gpupool.request_id"])
    assert (
        {"switch", "prefill", "decode"}
        <= spans.keys()
        <= {"load", "queue", "switch", "prefill", "decode"}
    )
    ordered = sorted(spans.values(), key=lambda one: one.start_time_unix_nano)
    for sooner, later in itertools.pairwise(ordered):
        assert sooner.end_time_unix_nano == later.start_time_unix_nano
    assert all(one.parent_span_id == whole.span_id for one in ordered)
    assert ordered[-1].end_time_unix_nano == whole.end_time_unix_nano
    shift_ns = ordered[0].start_time_unix_nano - whole.start_time_unix_nano
    assert abs(shift_ns) < 2e9


@pytest.mark.slow
def test_a_stream_ends_with_its_last_event(box: PrivateDaemon, collector: Collector) -> None:
    trace_id = "1" * 32
    ask(box, trace_id, stream=True, max_tokens=50)
    until(lambda: "decode" in collector.of_trace(trace_id))
    decode = collector.of_trace(trace_id)["decode"]
    assert decode.end_time_unix_nano - decode.start_time_unix_nano > 20e6


@pytest.mark.slow
def test_a_refusal_has_its_status(box: PrivateDaemon, collector: Collector) -> None:
    trace_id = "2" * 32
    assert ask(box, trace_id, model="unknown").status_code == 404
    until(lambda: bool(collector.of_trace(trace_id)))
    [span] = collector.of_trace(trace_id).values()
    assert attributes(span)["http.response.status_code"] == 404


@pytest.mark.parametrize("header", ["", "00-zz", "x" * 5000, "00-" + "0" * 32 + "-" + "0" * 16])
def test_a_wrong_trace_context_is_ignored(box: PrivateDaemon, header: str) -> None:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2}
    headers = {"traceparent": header, "tracestate": header}
    url = f"{box.http_url}/v1/completions"
    assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200


def test_no_text_and_no_key_is_told(box: PrivateDaemon, collector: Collector) -> None:
    until(lambda: len(collector.spans) > 3)
    told = b"".join(span.SerializeToString() for span in collector.spans)
    assert b"secret" not in told


@pytest.mark.slow
def test_nobody_waits_for_a_collector_that_is_away(tmp_path: Path) -> None:
    path = make_dummy_checkpoint(tmp_path, "Qwen2.5-7B")
    config = 'devices = ["sim:H800"]\n[traces]\nendpoint = "http://127.0.0.1:9/v1/traces"\n'
    with private_daemon(config, tmp_path / "pool") as daemon:
        daemon.add_model(MODEL, path, max_model_len=4096)
        for number in range(5):
            assert ask(daemon, f"{number + 3}" * 32).status_code == 200
