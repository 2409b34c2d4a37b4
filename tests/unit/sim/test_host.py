"""Host memory of simulated boxes: budgets, and the model cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from gpupoold.errors import UsageError
from gpupoold.scheduling.events import Action, Event
from gpupoold.sim.boxes import parse_box
from gpupoold.sim.device import BoxDevice
from gpupoold.sim.engine import SimOutcome, Simulation
from gpupoold.sim.host import HostMemory, HostWishes, ModelCache, host_bytes, host_memory
from gpupoold.sim.policies import PolicyOptions, make_policy
from gpupoold.sim.workloads import SimRequest
from tests.sim.box import GB, models, request

GIB = 1 << 30


def cache(num_models: int = 3, cache_gb: int = 20) -> tuple[ModelCache, list[str]]:
    """Models of 10 GB and a disk of 10 GB/s; the list has the evicted models."""
    evicted: list[str] = []
    weights = dict.fromkeys("abcd"[:num_models], 10 * GB)
    return ModelCache(HostMemory(0, cache_gb * GB, 10e9), weights, evicted.append), evicted


class TestBudgets:
    def test_defaults_are_the_daemons(self) -> None:
        box = parse_box("16xH800")
        assert host_bytes(box) == 4096 * GIB
        host = host_memory(box)
        # Half of a GPU for KV; all but KV, processes and the system's part for models.
        assert host.kv_bytes_per_gpu == 39 * GIB
        assert 3300 * GIB < host.model_cache_bytes < (4096 - 16 * 39) * GIB

    def test_a_group_has_the_memory_of_its_gpus(self) -> None:
        assert host_memory(parse_box("2x4xH800")) == host_memory(parse_box("8xH800"))

    def test_wishes_are_kept_and_leave_the_rest(self) -> None:
        box = parse_box("4xA10")
        less_kv = host_memory(box, HostWishes(kv_host_bytes=GIB))
        assert less_kv.kv_bytes_per_gpu == GIB
        assert less_kv.model_cache_bytes > host_memory(box).model_cache_bytes
        both = host_memory(box, HostWishes(8 * GIB, 9000 * GIB))
        assert (both.kv_bytes_per_gpu, both.model_cache_bytes) == (8 * GIB, 9000 * GIB)

    def test_a_wish_beyond_the_memory_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"memory\.model_cache"):
            host_memory(parse_box("1xA10"), HostWishes(model_cache_bytes=9000 * GIB))


class TestModelCache:
    def test_models_that_fit_are_there_from_the_start(self) -> None:
        [models_there, _] = cache()
        assert [models_there.arrived(name) for name in "abc"] == [True, True, False]
        assert models_there.next_read() is None  # a and b have requests

    def test_the_least_recently_used_idle_model_leaves(self) -> None:
        host, evicted = cache()
        for name in "ab":
            host.arrived(name)
            host.ended(name)
        host.arrived("a")
        host.ended("a")
        assert not host.arrived("c")
        assert host.next_read() == ("c", 1.0)
        assert evicted == ["b"]
        host.was_read()
        assert host.arrived("c")
        assert host.num_reads == 1

    def test_a_busy_model_stays_until_its_requests_have_ended(self) -> None:
        host, evicted = cache()
        host.arrived("a")
        host.arrived("b")
        host.arrived("c")
        assert host.next_read() is None
        assert evicted == []
        host.ended("b")
        assert host.next_read() == ("c", 1.0)
        assert evicted == ["b"]

    def test_models_are_read_one_after_another_in_order_of_request(self) -> None:
        host, _ = cache(num_models=4)
        host.arrived("d")
        host.arrived("c")
        host.arrived("d")
        assert host.next_read() == ("d", 1.0)
        assert host.next_read() is None
        host.was_read()
        assert host.next_read() == ("c", 1.0)

    def test_a_model_larger_than_the_cache_is_refused(self) -> None:
        with pytest.raises(UsageError, match="a weighs 10 GB"):
            cache(cache_gb=9)


def run(
    requests: list[SimRequest], *, cache_gb: int = 1000, kv_host_gb: float | None = None
) -> SimOutcome:
    """One device of 23 GB, models of 10 GB with 1 MB of KV per token, a disk of 5 GB/s."""
    simulation = Simulation(
        models("abc", kv_bytes_per_token=1_000_000),
        make_policy("gpupool", PolicyOptions()),
        [BoxDevice(23 * GB, kv_host_bytes=None if kv_host_gb is None else int(kv_host_gb * GB))],
        host=HostMemory(0, cache_gb * GB, 5e9),
    )
    [device] = simulation._devices
    handle = simulation.core.handle

    def checked(events: Iterable[Event], now_s: float) -> list[Action]:
        device.check_memory()
        return handle(events, now_s)

    simulation.core.handle = checked  # type: ignore[method-assign]
    outcome = simulation.run(requests, 1000.0)
    assert all(result.is_finished for result in outcome.results)
    return outcome


def test_a_request_for_an_uncached_model_waits_for_the_disk() -> None:
    requests = [request(name, 10.0 * n) for n, name in enumerate("abca")]
    requests[3] = replace(requests[3], id="a2")
    outcome = run(requests, cache_gb=20)
    first_s = [one.token_times_s[0] - one.request.arrival_s for one in outcome.results]
    # a and b are in memory; c, and then a again, are read in 2 s. Each load takes 1 s.
    assert first_s == pytest.approx([1.02, 1.02, 3.02, 3.02])
    assert outcome.num_reads == 2
    assert run(requests).num_reads == 0


def paused(num_answers: int = 8) -> list[SimRequest]:
    """Long answers of two models in turn, with 1 GB of KV each, more than fits beside weights."""
    return [
        request("ab"[n % 2], request_id=f"r{n}", prompt_tokens=600, output_tokens=400)
        for n in range(num_answers)
    ]


def test_kv_without_host_memory_is_computed_anew() -> None:
    assert run(paused()).num_dropped == 0
    bounded = run(paused(), kv_host_gb=8.0)
    dropped = run(paused(24), kv_host_gb=0.5)
    assert bounded.num_dropped == 0
    assert dropped.num_dropped > 0
