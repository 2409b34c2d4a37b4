"""``/metrics`` of a real daemon, as a real Prometheus and the example dashboard read it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.private_daemon import PrivateDaemon
from tests.conftest import ROOT
from tests.dashboard import metric_names, queries
from tests.functional.daemon_tools import admin_http, api_client, ask, child, ps, sim_daemon, until
from tests.functional.metrics_tools import scrape, value
from tests.functional.prometheus_server import (
    NOT_INSTALLED,
    Prometheus,
    is_installed,
    promtool,
    running_prometheus,
)

MODELS = ("one", "two", "three")
NUM_ASKED, NUM_TOKENS = 3, 24
# Room for one of the three, so that they take turns.
CONFIG = """
[[device]]
kind = "sim"
gpu = "H800"
memory = "20GiB"
"""
# What only NVML tells, or no simulated device: a scrape here has no sample of them.
NO_SAMPLES = {
    "gpupool_device_utilisation_ratio",
    "gpupool_device_temperature_celsius",
    "gpupool_device_power_watts",
    "gpupool_device_energy_joules_total",
    "gpupool_gpu_utilisation_ratio",
    "gpupool_gpu_temperature_celsius",
    "gpupool_gpu_power_watts",
    "gpupool_gpu_memory_used_bytes",
    "gpupool_device_engine_limit_bytes",
    "gpupool_device_kv_host_limit_bytes",
    "gpupool_drafts_total",
    "gpupool_draft_tokens_total",
    "gpupool_accepted_draft_tokens_total",
    "gpupool_paced_gap_seconds",
}
DOCUMENTED = re.compile(r"^- `([\w:]+?)(_total)?(?:{(.*)})?`(?: \((\w+)\))?: ", re.MULTILINE)
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateDaemon]:
    with sim_daemon(CONFIG, tmp_path_factory.mktemp("box"), MODELS, frontends=2) as daemon:
        yield daemon


@pytest.fixture(scope="module", autouse=True)
def watcher(
    box: PrivateDaemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus | None]:
    """A Prometheus where it is installed. Its first scrape comes seconds after its start, so it
    is started before all tests."""
    if not is_installed():
        yield None
        return
    with running_prometheus(box.http_url, tmp_path_factory.mktemp("prometheus")) as running:
        yield running


@pytest.fixture(scope="module")
def used(box: PrivateDaemon) -> None:
    """Let every model have some requests."""
    asyncio.run(traffic(box))
    until(lambda: not ps(box).requests)


async def traffic(box: PrivateDaemon) -> None:
    async with api_client(box.http_url) as api:
        await asyncio.gather(*(ask(api, name, "hi", NUM_TOKENS) for name in MODELS * NUM_ASKED))


class TestScrape:
    @pytest.fixture(autouse=True)
    def _after_traffic(self, used: None) -> None:
        """All of them look at a daemon that was used."""

    def test_what_was_asked_is_counted(self, box: PrivateDaemon) -> None:
        tokens = NUM_ASKED * NUM_TOKENS
        until(lambda: value(box, "gpupool_output_tokens_total", model="two") == tokens)
        for name in MODELS:
            assert value(box, "gpupool_requests_total", model=name) == NUM_ASKED
            ended = value(box, "gpupool_requests_finished_total", model=name, reason="length")
            assert ended == NUM_ASKED
            first = value(box, "gpupool_time_to_first_token_seconds_count", model=name)
            gaps = value(box, "gpupool_time_between_tokens_seconds_count", model=name)
            assert (first, gaps) == (NUM_ASKED, tokens - NUM_ASKED)
            turns = value(box, "gpupool_device_turns_total", device="0", model=name)
            assert turns is not None
            assert turns >= 1
        switches = value(box, "gpupool_switches_total", device="0")
        assert switches is not None
        assert switches >= len(MODELS)
        lag = value(box, "gpupool_event_loop_lag_seconds_count", process="frontend-1")
        assert lag is not None
        assert lag > 0
        assert value(box, "gpupool_frontend_up", frontend="1") == 1

    def test_public_port_tells_the_same(self, box: PrivateDaemon) -> None:
        answer = httpx.get(f"{box.http_url}/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = text_string_to_metric_families(answer.text)
        assert {one.name for one in families} == {one.name for one in scrape(box).values()}

    def test_names_and_texts_follow_the_conventions(self, box: PrivateDaemon) -> None:
        with admin_http(box) as http:
            text = http.get("/metrics").text
        # vLLM's own names break a convention.
        ours = "\n".join(line for line in text.splitlines() if "vllm:" not in line)
        assert promtool("check", "metrics", stdin=f"{ours}\n".encode()) == ""

    def test_endpoint_pickers_find_queue_kv_and_residency(self, box: PrivateDaemon) -> None:
        # A scrape within half a second of Prometheus' scrape has the same text.
        until(lambda: value(box, "vllm:num_requests_waiting") == 0)
        assert value(box, "vllm:num_requests_running") == 0
        share = value(box, "vllm:kv_cache_usage_perc")
        assert share is not None
        assert 0 <= share <= 1
        (sample,) = scrape(box)["vllm:lora_requests_info"].samples
        assert sample.labels["max_lora"] == str(len(MODELS))
        assert sample.labels["waiting_lora_adapters"] == ""
        resident = sample.labels["running_lora_adapters"].split(",")
        assert set(resident) < set(MODELS)  # the device has room for one or two

    def test_it_and_its_documentation_agree(self, box: PrivateDaemon) -> None:
        text = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
        rows = [
            (f"{name}{total}", kind or ("counter" if total else "gauge"), section, labels)
            for section in text.split("\n## ")
            for name, total, labels, kind in DOCUMENTED.findall(section)
        ]
        documented = {
            name: (kind, labels_of(section, labels)) for name, kind, section, labels in rows
        }
        assert len(documented) == len(rows), "a metric is there twice"
        scraped = scrape(box)
        assert documented.keys() == scraped.keys()
        assert {name for name, one in scraped.items() if not one.samples} == NO_SAMPLES
        for name, family in scraped.items():
            assert family.type == documented[name][0], name
            for sample in family.samples:
                assert sample.labels.keys() - {"le"} == documented[name][1], name

    def test_dashboard_and_alerts_use_only_what_there_is(self, box: PrivateDaemon) -> None:
        text = (EXAMPLES / "prometheus-alerts.yml").read_text(encoding="utf-8")
        expressions = [expression for _, expression in queries()]
        expressions += re.findall(r"expr: ([^|].*|\|(?:\n {10}.*)+)", text)
        used = set().union(*map(metric_names, expressions))
        suffixes = {"histogram": ("_bucket", "_count", "_sum")}
        known = {
            name + suffix
            for name, family in scrape(box).items()
            for suffix in suffixes.get(family.type, ("",))
        }
        assert used
        assert used <= known


def labels_of(section: str, labels: str) -> set[str]:
    """The labels in a metric's braces, and of all metrics of the section."""
    common = re.findall(r"^All have the label `(\w+)`", section, re.MULTILINE)
    return {*re.findall(r"\w+", labels), *common}


@pytest.fixture(scope="module")
def prometheus(box: PrivateDaemon, watcher: Prometheus | None) -> Prometheus:
    """It has seen the daemon before, during and after traffic."""
    if watcher is None:
        pytest.skip(NOT_INSTALLED)
    asked = 'gpupool_requests_finished_total{model="one",reason="length"}'
    until(lambda: watcher.value(asked) is not None)
    before = watcher.value(asked) or 0
    asyncio.run(traffic(box))
    until(lambda: watcher.value(asked) == before + NUM_ASKED)
    return watcher


def test_prometheus_takes_every_scrape(prometheus: Prometheus) -> None:
    assert prometheus.value('min_over_time(up{job="gpupool"}[5m])') == 1


def test_every_query_of_the_dashboard_has_data(prometheus: Prometheus) -> None:
    """Those without are of what only NVML tells."""
    empty = set()
    for title, expression in queries():
        values = [float(series["value"][1]) for series in prometheus.query(expression)]
        if not any(one == one for one in values):  # NaN is no data either
            empty.add(f"{title}: {sorted(metric_names(expression))}")
    nvml = ("utilisation_ratio", "temperature_celsius", "power_watts")
    titles = ("Utilisation", "Temperature", "Power")
    assert empty == {
        f"{title}: ['gpupool_device_{name}']" for title, name in zip(titles, nvml, strict=True)
    }


def test_examples_are_what_prometheus_reads() -> None:
    promtool("check", "config", EXAMPLES / "prometheus.yml")
    promtool("check", "rules", EXAMPLES / "prometheus-alerts.yml")


def test_alert_comes_for_the_model_that_is_late_only(tmp_path: Path) -> None:
    series = [
        {"series": f'gpupool_output_tokens{kind}_total{{model="{model}"}}', "values": f"0+{n}x30"}
        for model, kind, n in (("a", "", 100), ("a", "_in_time", 90), ("b", "", 100))
    ]
    series.append({"series": 'gpupool_output_tokens_in_time_total{model="b"}', "values": "0+99x30"})
    annotations = {
        "summary": "a: 90% of tokens in time",
        "description": "Latencies exceed the model's targets. `gpupool why a` prints the causes, "
        "`gpupool plan` possible remedies.",
    }
    alert = {
        "eval_time": "25m",
        "alertname": "GpupoolTokensLate",
        "exp_alerts": [
            {"exp_labels": {"severity": "warning", "model": "a"}, "exp_annotations": annotations}
        ],
    }
    tests = {
        "rule_files": [str(EXAMPLES / "prometheus-alerts.yml")],
        "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": [alert]}],
    }
    path = tmp_path / "tests.yml"  # JSON is YAML
    path.write_text(json.dumps(tests))
    promtool("test", "rules", path)


# These change the box: they come last.


def test_worker_that_dies_is_counted(box: PrivateDaemon) -> None:
    child(box, "simdevice").kill()
    until(lambda: value(box, "gpupool_worker_restarts_total", device="0") == 1)
    until(lambda: value(box, "gpupool_device_up", device="0") == 1)


def test_model_that_is_removed_disappears(box: PrivateDaemon) -> None:
    assert any("three" in one.labels.values() for one in samples(box))
    with box.client() as client:
        client.remove_model("three")
    until(lambda: not any("three" in one.labels.values() for one in samples(box)))
    assert value(box, "gpupool_models") == 2


def samples(box: PrivateDaemon) -> list[Sample]:
    return [one for family in scrape(box).values() for one in family.samples]
