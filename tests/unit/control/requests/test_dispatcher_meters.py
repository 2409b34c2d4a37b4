"""What a dispatcher counts of the requests that go through it."""

from __future__ import annotations

import time

from gpupool_state import History
from gpupoold.domain import Targets
from gpupoold.scheduling.events import TargetsChanged
from gpupoold.wire import messages as m
from tests.unit.control.requests.dispatcher_bench import NAME, Bench


def step(*progress: m.RequestProgress) -> m.StepOutputs:
    return m.StepOutputs(NAME, time.monotonic(), [b""], list(progress))


async def test_a_request_from_its_arrival_to_its_end(history: History) -> None:
    bench = Bench(history)
    bench.cold.warm.add(NAME)
    bench.ask("a")
    bench.dispatcher.from_worker(bench.worker, step(m.RequestProgress("a", [7])))
    bench.dispatcher.from_worker(bench.worker, step(m.RequestProgress("a", [8, 9], "length")))
    meter = bench.dispatcher.accounts.meters.models[NAME]
    counts = bench.dispatcher.accounts.stats[NAME].so_far_with_latencies()
    assert (counts.requests, meter.prompt_tokens, counts.tokens) == (1, 2, 3)
    assert (len(counts.ttft), len(counts.tbt)) == (1, 2)
    assert meter.finished == {"length": 1}
    assert (meter.cache_hits, meter.cache_misses) == (1, 0)


async def test_refused_aborted_and_waiting_for_an_snapshot(history: History) -> None:
    bench = Bench(history)
    for request_id in "abcd":
        bench.ask(request_id)
    bench.dispatcher.from_frontend(m.AbortRequests(NAME, ["a"]))
    meter = bench.dispatcher.accounts.meters.models[NAME]
    assert meter.refused == {"model_queue_full": 1}
    assert (bench.dispatcher.accounts.stats[NAME].so_far().requests, meter.cache_misses) == (3, 3)
    assert meter.finished == {"abort": 1}


async def test_dropped_ones_end_with_an_error(history: History) -> None:
    bench = Bench(history, drop_late=True)
    bench.ask("late", time.monotonic() - 2 * Targets().ttft_s)
    bench.dispatcher.tick(time.monotonic())
    meter = bench.dispatcher.accounts.meters.models[NAME]
    assert (bench.dispatcher.accounts.stats[NAME].so_far().dropped, meter.finished) == (
        1,
        {"error": 1},
    )


async def test_one_that_loses_its_worker_is_resumed(history: History) -> None:
    bench = Bench(history)
    bench.cold.warm.add(NAME)
    bench.ask("a")
    bench.dispatcher.worker_down(bench.worker, "killed")
    assert bench.dispatcher.accounts.meters.models[NAME].resumed == 1


async def test_the_core_is_timed(history: History) -> None:
    bench = Bench(history)
    before = len(bench.dispatcher.shell.decisions)
    bench.dispatcher.shell.handle(TargetsChanged(NAME, Targets(1.0, 1.0)))
    assert len(bench.dispatcher.shell.decisions) == before + 1
