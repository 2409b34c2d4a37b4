"""The text at ``/metrics`` of a pool in which this and that has happened."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gpupoold.config.sections import DeviceSettings
from gpupoold.control.accounting.model_stats import ModelStats
from gpupoold.control.control_plane import ControlPlane
from gpupoold.domain import DeviceActivity, DeviceFacts, ModelName, ModelSpec, Targets
from gpupoold.errors import Failed
from gpupoold.metrics.exposition import Exporter
from gpupoold.system.nvml import Reading, of_group
from gpupoold.wire import messages as m

MODEL = "org/llama-3:8b"


def exporter_of(control_plane: ControlPlane) -> Exporter:
    """An exporter whose text is new at each call: its clock goes on by a second."""
    seconds = itertools.count()
    return Exporter(control_plane, lambda: float(next(seconds)))


async def samples(exporter: Exporter) -> list[Sample]:
    families = text_string_to_metric_families((await exporter.text()).decode())
    return [sample for family in families for sample in family.samples]


def values(found: Iterable[Sample], name: str) -> dict[str, float]:
    """By the values of the labels."""
    return {
        " ".join(one.labels.values()): one.value for one in found if one.name == f"gpupool_{name}"
    }


async def add(control_plane: ControlPlane) -> None:
    await control_plane.registry.add(
        ModelSpec(ModelName(MODEL), "hub", "/it", targets=Targets(3, 0.2))
    )


async def test_a_pool_that_has_just_begun(control_plane: ControlPlane) -> None:
    found = await samples(exporter_of(control_plane))
    assert values(found, "ready") == {"": 0}
    assert values(found, "models") == {"": 0}
    assert values(found, "device_up") == {"0": 0, "1": 0}
    assert values(found, "device_memory_bytes") == {}
    assert all(one.labels.get("model") is None for one in found)


async def test_a_model_has_all_its_samples_from_the_first(control_plane: ControlPlane) -> None:
    await add(control_plane)
    found = await samples(exporter_of(control_plane))
    reasons = ("stop", "length", "abort", "error")
    assert values(found, "requests_finished_total") == {f"{MODEL} {one}": 0 for one in reasons}
    assert values(found, "target_time_to_first_token_seconds") == {MODEL: 3}
    assert values(found, "attainment_ratio") == {}
    states = values(found, "model_state")
    assert {state for state, value in states.items() if value} == {f"{MODEL} registered"}
    assert len(states) == 5


async def test_what_was_counted_is_told_until_the_model_is_removed(
    control_plane: ControlPlane,
) -> None:
    await add(control_plane)
    exporter, meter = (
        exporter_of(control_plane),
        control_plane.dispatcher.accounts.meters.models[MODEL],
    )
    meter.refused["queue_full"] = 3
    counts = control_plane.dispatcher.accounts.stats.setdefault(MODEL, ModelStats()).now
    counts.tokens, counts.tokens_in_time = 8, 6
    for seconds in (0.0015, 0.04, 1000.0):
        counts.tbt.add(seconds)
    counts.between_tokens.kv_s, counts.first_token.queueing_s = 0.25, 0.5
    assert not values(await samples(exporter_of(control_plane)), "drafts_total")
    control_plane.dispatcher.accounts.stats[MODEL].drafts = m.DraftCounts(2, 8, 3)
    found = await samples(exporter)
    assert values(found, "draft_tokens_total") == {MODEL: 8}
    assert values(found, "accepted_draft_tokens_total") == {MODEL: 3}
    assert values(found, "requests_refused_total")[f"{MODEL} queue_full"] == 3
    assert values(found, "attainment_ratio") == {MODEL: 0.75}
    buckets = values(found, "time_between_tokens_seconds_bucket")
    expected = {"0.001": 0, "0.002": 1, "0.03": 1, "0.05": 2, "300.0": 2, "+Inf": 3}
    assert {le: buckets[f"{le} {MODEL}"] for le in expected} == expected
    stages = values(found, "request_stage_seconds_total")
    assert len(stages) == 10
    assert {labels: value for labels, value in stages.items() if value} == {
        f"{MODEL} between_tokens kv": 0.25,
        f"{MODEL} first_token queueing": 0.5,
    }
    await control_plane.registry.remove(ModelName(MODEL))
    assert not [one for one in await samples(exporter) if "model" in one.labels]
    assert control_plane.dispatcher.accounts.meters.models == {}


async def test_what_devices_tell(control_plane: ControlPlane) -> None:
    await add(control_plane)
    worker = control_plane.supervisor.workers[1]
    worker.reading = Reading(0.5, 61.0, None)
    worker.ready = m.WorkerReady(
        DeviceFacts(1000, 10, 1e9, kv_host_limit_bytes=500), "0.32.0", "H100"
    )
    held = m.ModelMemory(
        model=MODEL,
        weights_resident_bytes=300,
        weights_total_bytes=300,
        kv_resident_bytes=200,
        kv_host_bytes=100,
        num_live=3,
        num_waiting=2,
        encoder_bytes=50,
    )
    worker.status = m.WorkerStatus(0.0, DeviceActivity(MODEL, 42, 500, 100), 0.5, [held])
    found = await samples(exporter_of(control_plane))
    assert values(found, "device_utilisation_ratio") == {"1": 0.5}
    assert values(found, "device_temperature_celsius") == {"1": 61}
    assert values(found, "device_power_watts") == {}
    assert values(found, "device_memory_bytes") == {"1 free": 500, "1 weights": 300, "1 kv": 200}
    assert values(found, "device_kv_host_limit_bytes") == {"1": 500}
    assert values(found, "device_steps_total") == {"1": 42}
    assert values(found, "device_info") == {"0 cuda ": 1, "1 cuda H100": 1}
    assert values(found, "waiting_requests") == {MODEL: 2}
    assert values(found, "device_gpus") == {"0": 1, "1": 1}
    assert values(found, "gpu_power_watts") == {}
    (info,) = (one for one in found if one.name == "vllm:lora_requests_info")
    assert info.labels["waiting_lora_adapters"] == ""  # on a device, and waits for a turn
    picked = {one.name: one.value for one in found if one.name.startswith("vllm:")}
    assert picked["vllm:num_requests_waiting"] == 2
    assert picked["vllm:kv_cache_usage_perc"] == pytest.approx(200 / 700)
    kinds = {"weights": 300, "kv": 200, "encoder": 50, "kv_host": 100, "snapshot_host": 0}
    assert values(found, "model_memory_bytes") == {
        f"{kind} {MODEL}": value for kind, value in kinds.items()
    }


async def test_what_the_gpus_of_a_group_tell(control_plane: ControlPlane) -> None:
    worker = control_plane.supervisor.workers[1]
    worker.device = DeviceSettings.model_validate({"kind": "cuda", "gpus": (4, 5)})
    worker.ready = m.WorkerReady(DeviceFacts(1000, 10, 1e9), "0.32.0", "2xH100")
    worker.reading = of_group([Reading(0.5, 61.0, 100.0, 40, 4), Reading(0.7, None, 90.0, 42, 5)])
    worker.status = m.WorkerStatus(0.0, DeviceActivity(None, 42, 500, 0), 0.5, [])
    found = await samples(exporter_of(control_plane))
    assert values(found, "device_gpus") == {"0": 1, "1": 2}
    assert values(found, "device_utilisation_ratio") == {"1": pytest.approx(0.6)}
    assert values(found, "device_power_watts") == {"1": 190}
    assert values(found, "gpu_utilisation_ratio") == {"1 4": 0.5, "1 5": 0.7}
    assert values(found, "gpu_temperature_celsius") == {"1 4": 61}
    assert values(found, "gpu_memory_used_bytes") == {"1 4": 40, "1 5": 42}
    group, single = control_plane.devices()[1], control_plane.devices()[0]
    assert [(one.gpu, one.memory_bytes, one.free_bytes) for one in group.gpus] == [
        (4, 500, 250),
        (5, 500, 250),
    ]
    assert single.gpus == []


async def test_disk_that_fails_takes_only_its_own_sample(
    control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> int:
        raise OSError(5, "Input/output error")

    exporter = exporter_of(control_plane)
    assert values(await samples(exporter), "model_cache_disk_bytes") == {"": 0}
    monkeypatch.setattr(type(control_plane.saved), "used_bytes", lambda _: fail())
    found = await samples(exporter)
    assert values(found, "model_cache_disk_bytes") == {}
    assert values(found, "models") == {"": 0}


async def test_registry_that_cannot_be_read_has_the_models_of_before(
    control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add(control_plane)
    exporter = exporter_of(control_plane)
    before = {one.name for one in await samples(exporter)}

    async def fail() -> None:
        raise Failed("the database is locked")

    monkeypatch.setattr(control_plane.registry, "list", fail)
    found = await samples(exporter)
    assert {one.name for one in found} == before
    assert values(found, "requests_total") == {MODEL: 0}


async def test_who_asks_often_gets_the_same(control_plane: ControlPlane) -> None:
    exporter = Exporter(control_plane, lambda: 7.0)
    first = await exporter.text()
    await add(control_plane)
    assert await exporter.text() is first
