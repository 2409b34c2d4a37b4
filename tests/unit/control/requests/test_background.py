"""Background requests in the daemon: held until a device has time to spare, and counted apart."""

from __future__ import annotations

import time

from gpupool_state import History
from gpupoold.config.sections import LimitSettings
from gpupoold.domain import BACKGROUND_TTFT_S, FinishReason, Priority
from gpupoold.wire import messages as m
from tests.unit.control.requests.dispatcher_bench import NAME, Bench

_LONG_AGO_S = -100_000.0


def ask(bench: Bench, *names: str, arrival_s: float | None = None, key_id: str = "") -> None:
    bench.cold.warm.add(NAME)
    drop_late = bench.dispatcher._overload.limits.drop_late
    bench.dispatcher.set_limits(LimitSettings(drop_late=drop_late))
    at_s = time.monotonic() if arrival_s is None else arrival_s
    for name in names:
        order = m.AddRequest(NAME, name, at_s, 2, 8, [b""], key_id=key_id)
        order.priority = Priority.BACKGROUND
        bench.dispatcher.from_frontend(order)


def step(bench: Bench, *names: str, finish_reason: str | None = None) -> None:
    progress = [m.RequestProgress(name, [5], finish_reason) for name in names]
    bench.dispatcher.from_worker(bench.worker, m.StepOutputs(NAME, time.monotonic(), [], progress))


async def test_background_waits_while_a_prompt_waits(bench: Bench) -> None:
    bench.cold.warm.add(NAME)
    bench.ask("user")
    ask(bench, "batch")
    assert list(bench.scheduled) == ["user"]
    step(bench, "user", finish_reason="stop")
    assert list(bench.scheduled) == ["batch"]
    assert bench.scheduled["batch"].ttft_s == BACKGROUND_TTFT_S
    bench.check()


async def test_a_request_that_ended_meanwhile_is_passed_over(bench: Bench) -> None:
    bench.cold.warm.add(NAME)
    bench.ask("user")
    ask(bench, "left", "stays")
    bench.dispatcher.from_frontend(m.AbortRequests(NAME, ["left"]))
    step(bench, "user", finish_reason="stop")
    assert list(bench.scheduled) == ["stays"]


async def test_background_is_on_no_account_of_latency(bench: Bench) -> None:
    ask(bench, "batch", arrival_s=_LONG_AGO_S)
    step(bench, "batch")
    step(bench, "batch", finish_reason="stop")
    stats = bench.dispatcher.accounts.stats[NAME]
    assert (stats.now.tokens, stats.now.first_tokens, stats.background_tokens) == (0, 0, 2)
    assert stats.now.completed == 1
    assert bench.dispatcher.accounts.meters.models[NAME].finished[FinishReason.STOP] == 1


async def test_background_has_no_time_limit_between_tokens(bench: Bench) -> None:
    ask(bench, "batch", arrival_s=_LONG_AGO_S)
    bench.dispatcher.end_overdue(time.monotonic())
    assert len(bench.dispatcher.live) == 1


async def test_background_is_not_counted_for_the_bounds_of_a_key(bench: Bench) -> None:
    ask(bench, "one", "two", key_id="k")
    assert bench.dispatcher.live.num_of_key("k") == 0
    step(bench, "one", "two", finish_reason="stop")
    assert bench.dispatcher.live.num_of_key("k") == 0


async def test_background_goes_on_after_the_loss_of_a_worker(bench: Bench) -> None:
    ask(bench, "batch")
    bench.dispatcher.worker_down(bench.worker, "killed")
    assert bench.scheduled == {}
    bench.come_back()
    bench.dispatcher.tick(time.monotonic())
    assert list(bench.scheduled) == ["batch"]
    bench.check()


async def test_background_is_never_too_late(history: History) -> None:
    bench = Bench(history, drop_late=True)
    ask(bench, "batch", arrival_s=_LONG_AGO_S)
    bench.dispatcher.tick(time.monotonic())
    assert len(bench.dispatcher.live) == 1
    assert bench.frontend.refusals == []


async def test_half_of_a_queue_is_kept_from_background(bench: Bench) -> None:
    bench.cold.warm.add(NAME)
    for name in ("one", "two"):
        order = m.AddRequest(NAME, name, 0.0, 2, 8, [b""], priority=Priority.BACKGROUND)
        bench.dispatcher.from_frontend(order)
    assert [one.request_id for one in bench.frontend.refusals] == ["two"]
    bench.ask("user")
    assert len(bench.dispatcher.live) == 2
