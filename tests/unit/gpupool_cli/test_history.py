"""``history`` and ``switches``: what was asked of the daemon, and how its answer looks."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from pydantic import TypeAdapter

from gpupool_cli import output
from gpupoold.api.schemas_explain import ModelSpan, SpanInfo
from gpupoold.domain import DeviceUse, RequestRecord
from gpupoold.durations import Lateness, RequestStages
from tests.unit.gpupool_cli import samples
from tests.unit.gpupool_cli.conftest import Cli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon

RECORD = RequestRecord(
    request_id="cmpl-1",
    model="qwen",
    arrived_at=samples.AT,
    ttft_s=0.5,
    tbt_p99_s=None,
    num_prompt_tokens=12,
    num_output_tokens=30,
    num_tokens_in_time=28,
    finish_reason="stop",
    total_s=2.0,
)


def span(**more: object) -> SpanInfo:
    values: dict[str, object] = {
        "at": samples.AT,
        "span_s": 60,
        "requests": 7,
        "completed": 5,
        "aborted": 1,
        "failed": 1,
        "refused": 2,
        "dropped": 0,
        "tokens": 100,
        "tokens_in_time": 95,
        "attainment": 0.95,
        "ttft_p50_s": 0.4,
        "ttft_p99_s": 1.2,
        "tbt_p50_s": 0.02,
        "tbt_p99_s": None,
        "lateness": Lateness(loading_s=0, queueing_s=3.5, switching_s=0.25, computing_s=0),
    }
    return TypeAdapter(SpanInfo).validate_python(values | more)


def model_span(model: str, counts: SpanInfo) -> ModelSpan:
    return TypeAdapter(ModelSpan).validate_python(asdict(counts) | {"model": model})


def test_switches(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.switches = [samples.switch("b", "a"), samples.switch("a", None)]
    lines = cli("switches").stdout.splitlines()
    assert lines[1].startswith(output.time_text(samples.AT))
    assert lines[1].split()[2:] == "0 b a 340ms 10ms 20ms 300ms 10ms 15 GiB".split()
    assert len(json.loads(cli("switches", "--limit", "1", "--json").stdout)) == 1


def test_switches_of_a_model_on_a_device_slowest_first(daemon: FakeDaemon, cli: Cli) -> None:
    args = ("--model", "b", "--device", "1", "--since", "10m", "--slowest", "-n", "3")
    assert cli("switches", *args).exit_code == 0
    asked = {"model": "b", "device": "1", "since_s": "600.0", "order": "slowest", "limit": "3"}
    assert daemon.queries == [asked]


def test_history_by_spans_of_time(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.spans = [
        span(),
        span(
            attainment=None,
            lateness=dict.fromkeys(("loading_s", "queueing_s", "switching_s", "computing_s"), 0.0),
        ),
    ]
    lines = cli("history").stdout.splitlines()
    assert lines[1].startswith(output.time_text(samples.AT))
    numbers = "60s 7 1 2 100 95.0 400ms 1.2s 20ms -".split()
    assert lines[1].split()[2:] == [*numbers, "queueing", "3.5s,", "switching", "250ms"]
    assert lines[2].split()[7] == "-"
    assert lines[2].split()[-1] == "-"
    assert daemon.queries == [{"since_s": "3600.0"}]
    [first, _] = json.loads(cli("history", "qwen", "--since", "7d", "--json").stdout)
    assert first["lateness"]["queueing_s"] == 3.5
    assert daemon.queries[-1] == {"model": "qwen", "since_s": "604800.0"}


def test_history_by_stage(daemon: FakeDaemon, cli: Cli) -> None:
    first = RequestStages(loading_s=2.0, queueing_s=4.0, switching_s=1.0, kv_s=1.0, computing_s=8.0)
    between = RequestStages(queueing_s=2.0, computing_s=4.0)
    busy = span(first_tokens=4, first_token=first, between_tokens=between)
    daemon.model_spans = [model_span("qwen", busy), model_span("idle", span())]
    done = cli("history", "--breakdown", "--since", "90s")
    titles, *rows = [line.split() for line in done.stdout.splitlines()]
    assert titles[:4] == ["MODEL", "REQUESTS", "TIME", "TOTAL"]
    assert titles[4:] == ["LOADING", "QUEUEING", "SWITCHING", "KV", "COMPUTING"]
    assert rows == [
        "qwen 4 first token 4s 500ms 1s 250ms 250ms 2s".split(),
        "qwen 4 between tokens 1.5s - 500ms - - 1s".split(),
    ]
    assert daemon.queries == [{"since_s": "90.0"}] * 2
    daemon.queries.clear()
    answer = json.loads(cli("history", "qwen", "--breakdown", "--json").stdout)
    assert [one["model"] for one in answer["models"]] == ["qwen", "idle"]
    assert answer["models"][0]["first_token"] == asdict(first)
    assert answer["devices"] == []
    assert daemon.queries[0] == {"model": "qwen", "since_s": "3600.0"}


def test_breakdown_has_the_fragmentation_of_host_kv(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.model_spans = [model_span("qwen", span(first_tokens=1))]
    daemon.usage.devices = [device_use(0, 3 << 30, 4 << 30), device_use(1, 0, 0)]
    lines = cli("history", "--breakdown").stdout.splitlines()
    assert [line.split() for line in lines[-2:]] == [
        ["DEVICE", "KV-HOST", "SLABS", "FRAGMENTATION"],
        ["0", "3", "GiB", "4", "GiB", "25.0%"],
    ]
    answer = json.loads(cli("history", "--breakdown", "--json").stdout)
    assert [one["kv_host_bytes"] for one in answer["devices"]] == [3 << 30, 0]


def device_use(device: int, kv_host_bytes: int, kv_host_slab_bytes: int) -> DeviceUse:
    return DeviceUse(
        device=device,
        seconds=60.0,
        computing_s=30.0,
        switching_s=6.0,
        energy_j=None,
        kv_host_bytes=kv_host_bytes,
        kv_host_slab_bytes=kv_host_slab_bytes,
    )


def test_a_breakdown_of_nothing(daemon: FakeDaemon, cli: Cli) -> None:
    assert cli("history", "--breakdown").stdout == "no request in the last 60m\n"
    done = cli("history", "--breakdown", "--requests")
    assert done.exit_code == 2
    assert "exclude each other" in done.stderr


def test_history_of_single_requests(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.history = [RECORD]
    lines = cli("history", "--requests", "-n", "5", "--since", "90s").stdout.splitlines()
    assert lines[1].split()[2:] == "cmpl-1 qwen 12 30 2 500ms - 2s stop".split()
    assert daemon.queries == [{"since_s": "90.0", "limit": "5"}]
    assert json.loads(cli("history", "--requests", "--json").stdout)[0]["request_id"] == "cmpl-1"


def test_history_of_the_request_that_a_client_names(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.history = [RECORD]
    assert "cmpl-1" in cli("history", "--id", "cmpl-1").stdout
    [query] = daemon.queries
    assert query == {"since_s": str(10 * 365 * 86400.0), "limit": "100", "request_id": "cmpl-1"}
    daemon.history = []
    assert cli("history", "--id", "x").stdout == "no request with the id x has ended\n"
    shown = cli("history", "q", "--id", "x", "--since", "5m").stdout
    assert shown == "no request of q with the id x has ended in the last 5m\n"


def test_nothing_happened(daemon: FakeDaemon, cli: Cli) -> None:
    assert cli("history").stdout == "no request in the last 60m\n"
    assert cli("history", "q", "--since", "5m").stdout == "no request of q in the last 5m\n"
    assert cli("history", "--json").stdout == "[]\n"


@pytest.mark.parametrize("text", ["soon", "0", "-1h", "5 weeks"])
def test_a_duration_that_is_none(daemon: FakeDaemon, cli: Cli, text: str) -> None:
    assert cli("history", f"--since={text}").exit_code == 2
    assert daemon.queries == []
