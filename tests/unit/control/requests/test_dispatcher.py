"""Requests of models that have to be warmed: they wait, leave, go on or fail."""

from __future__ import annotations

import time

import pytest

from gpupool_state import History
from gpupoold.domain import FinalFailure, FinishReason, Targets
from gpupoold.errors import NoSuchRequest
from gpupoold.frontend.request_context import RequestIds
from gpupoold.wire import messages as m
from tests.unit.control.loaded import WEIGHT_BYTES, loaded
from tests.unit.control.requests.dispatcher_bench import NAME, Bench


async def test_a_warm_model_is_scheduled_at_once(bench: Bench) -> None:
    bench.cold.warm.add(NAME)
    bench.ask("a")
    assert list(bench.scheduled) == ["a"]
    assert (bench.cold.begun, bench.cold.uses) == ([], [f"used {NAME}"])


async def test_requests_wait_and_keep_their_arrival(bench: Bench) -> None:
    first_s = time.monotonic() - 5.0
    bench.ask("a", first_s)
    bench.ask("b")
    assert bench.cold.begun == [NAME, NAME]
    assert bench.scheduled == {}
    assert bench.dispatcher.live.num_waiting(NAME) == bench.dispatcher.live.num_of(NAME) == 2
    bench.cold.warm.add(NAME)
    bench.dispatcher.go_on(NAME)
    assert list(bench.scheduled) == ["a", "b"]
    assert bench.scheduled["a"].arrival_s == first_s
    assert bench.dispatcher.live.num_waiting(NAME) == 0
    bench.dispatcher.go_on(NAME)
    bench.check()


async def test_waiting_requests_count_for_the_limits(bench: Bench) -> None:
    for request_id in ("a", "b", "c", "d"):
        bench.ask(request_id)
    [refused] = bench.frontend.refusals
    assert (refused.request_id, refused.status) == ("d", 429)
    assert "already has 3 requests" in refused.message
    assert refused.retry_after_s > 0
    assert bench.frontend.sent == []


async def test_late_requests_end_before_they_begin(history: History) -> None:
    bench = Bench(history, drop_late=True)
    bench.ask("late", time.monotonic() - 2 * Targets().ttft_s)
    bench.ask("young")
    bench.dispatcher.tick(time.monotonic())
    [failed] = bench.frontend.sent
    assert isinstance(failed, m.RequestsFailed)
    assert (failed.request_ids, failed.message[:8]) == (["late"], "dropped:")
    assert bench.dispatcher.live.num_waiting(NAME) == len(bench.dispatcher.live) == 1
    assert bench.dispatcher.accounts.stats[NAME].now.dropped == 1


async def test_late_requests_wait_where_nobody_says_otherwise(bench: Bench) -> None:
    bench.ask("late", time.monotonic() - 1000.0)
    bench.dispatcher.tick(time.monotonic())
    assert (bench.frontend.sent, bench.dispatcher.live.num_waiting(NAME)) == ([], 1)


async def test_cancelled_requests_leave(bench: Bench, history: History) -> None:
    for request_id in ("a", "b"):
        bench.ask(request_id)
    bench.dispatcher.from_frontend(m.AbortRequests(NAME, ["a"]))
    assert bench.dispatcher.live.num_waiting(NAME) == 1
    assert bench.cold.uses[-1] == f"left {NAME}"
    bench.dispatcher.go_on(NAME)
    assert list(bench.scheduled) == ["b"]
    await history.flush()
    [row] = await history.recent_requests()
    assert (row.request_id, row.finish_reason, row.device) == ("a", FinishReason.ABORT, None)
    bench.check()


async def test_a_frontend_that_dies_takes_them_along(bench: Bench) -> None:
    bench.ask("a")
    bench.dispatcher.frontend_down(0)
    assert (bench.dispatcher.live.num_waiting(NAME), len(bench.dispatcher.live)) == (0, 0)


async def test_a_frontend_that_dies_leaves_the_others_requests_alone(bench: Bench) -> None:
    bench.cold.warm.add(NAME)
    for request_id, frontend in (("a", 0), ("b", 1), ("c", 0)):
        bench.ask(request_id, frontend=frontend)
    bench.cold.warm.clear()
    bench.dispatcher.frontend_down(0)
    assert [one.request_id for one in bench.dispatcher.live.all()] == ["b"]
    assert list(bench.scheduled) == ["b"]
    assert (bench.frontend.sent, bench.others[1].sent) == ([], [])
    bench.dispatcher.frontend_down(0)  # it died again while it started
    assert len(bench.dispatcher.live) == 1
    bench.check()


async def test_a_result_ends_a_request_with_one_token_in_time(
    bench: Bench, history: History
) -> None:
    bench.cold.warm.add(NAME)
    bench.ask("r")
    result = m.RequestProgress("r", [], "stop", has_result=True)
    at_s = time.monotonic()
    bench.dispatcher.from_worker(bench.worker, m.StepOutputs(NAME, at_s, [b"x"], [result]))
    assert not bench.scheduled
    stats = bench.dispatcher.accounts.stats[NAME].so_far()
    assert (stats.tokens, stats.tokens_in_time, stats.completed) == (1, 1, 1)
    await history.flush()
    [row] = await history.recent_requests()
    assert (row.num_output_tokens, row.num_tokens_in_time, row.finish_reason) == (1, 1, "stop")
    assert row.ttft_s is not None
    bench.check()


async def test_each_frontend_hears_of_its_own_requests_only(bench: Bench) -> None:
    bench.cold.warm.add(NAME)
    for request_id, frontend in (("a", 0), ("b", 1)):
        bench.ask(request_id, frontend=frontend)
    a, b = m.RequestProgress("a", [7]), m.RequestProgress("b", [8], "stop")
    outputs = m.StepOutputs(NAME, 5.0, [b"of b", b"of a", b"more"], [b, a], None, {1: 1, 0: 2})
    bench.dispatcher.from_worker(bench.worker, outputs)
    first, *outputs_of_a = bench.frontend.sent
    assert isinstance(first, m.FirstTokens)
    assert [one.request_id for one in first.requests] == ["a"]
    assert outputs_of_a == [m.StepOutputs(NAME, 5.0, [b"of a", b"more"], [a])]
    assert bench.others[1].sent[1:] == [m.StepOutputs(NAME, 5.0, [b"of b"], [b])]
    bench.ask("c", frontend=1)
    bench.dispatcher.from_worker(bench.worker, m.RequestsFailed(NAME, ["a", "c", "b"], "no"))
    assert bench.frontend.sent[2:] == [m.RequestsFailed(NAME, ["a"], "no")]
    assert bench.others[1].sent[2:] == [m.RequestsFailed(NAME, ["c"], "no")]
    for number in range(4):
        bench.ask(f"full {number}", frontend=2)
    assert [one.request_id for one in bench.others[2].refusals] == ["full 3"]
    bench.dispatcher.fail_model(NAME, "damaged")
    assert len(bench.frontend.sent) == len(bench.others[1].sent) == 3
    [failed] = bench.others[2].sent
    assert isinstance(failed, m.RequestsFailed)
    assert failed.request_ids == ["full 0", "full 1", "full 2"]


async def test_grammar_over_a_bound_is_told_to_all_frontends(bench: Bench) -> None:
    """For the API key of the request, as the request's end is told to its own frontend."""
    bench.cold.warm.add(NAME)
    bench.ask("a")
    failed = m.RequestsFailed(
        NAME, ["a"], "too costly", code=FinalFailure.GRAMMAR, grammar="digest"
    )
    for _ in range(2):  # unknown the second time
        bench.dispatcher.from_worker(bench.worker, failed)
    assert bench.cold.refused == [m.GrammarRefused(NAME, "", "digest", "too costly")]
    ended = m.RequestsFailed(NAME, ["a"], "too costly", 400, "grammar_over_bound")
    assert bench.frontend.sent[-1:] == [ended]


async def test_all_fail_when_the_model_cannot_be_warmed(bench: Bench, history: History) -> None:
    bench.cold.warm.add(NAME)
    bench.ask("scheduled")
    bench.cold.warm.clear()
    for request_id in ("a", "b"):
        bench.ask(request_id)
    bench.dispatcher.fail_waiting(NAME, "no room")
    bench.dispatcher.fail_waiting(NAME, "no room")
    assert bench.frontend.sent == [m.RequestsFailed(NAME, ["a", "b"], "no room")]
    assert list(bench.scheduled) == ["scheduled"]
    assert len(bench.dispatcher.live) == 1
    await history.flush()
    rows = await history.recent_requests()
    assert {row.request_id: row.finish_reason for row in rows} == {
        "a": FinishReason.ERROR,
        "b": FinishReason.ERROR,
    }
    bench.check()


async def test_wrong_answers_are_passed_on(bench: Bench) -> None:
    bench.dispatcher.from_worker(bench.worker, m.WrongAnswer(NAME, (1,), (2,)))
    assert bench.cold.uses == [f"damaged {NAME}"]


async def test_a_model_that_is_removed_takes_them_along(bench: Bench) -> None:
    bench.ask("a")
    bench.dispatcher.fail_model(NAME, "removed")
    bench.dispatcher.forget(NAME)
    bench.dispatcher.go_on(NAME)
    assert (bench.scheduled, len(bench.dispatcher.live)) == ({}, 0)
    assert bench.frontend.sent == [m.RequestsFailed(NAME, ["a"], "removed")]


async def test_what_a_model_lacks_is_known_although_reported_before_its_place(bench: Bench) -> None:
    """A worker reports it right after the load, and again only after a change."""
    state = bench.dispatcher.state
    bench.dispatcher.unhost(NAME, bench.worker)
    bench.dispatcher.forget(NAME)
    bench.dispatcher.from_worker(bench.worker, m.MemoryReport({NAME: 0, "stranger": 5}))
    assert state.devices[0].missing_bytes == {}
    bench.dispatcher.host(Targets(), loaded(NAME), None, bench.worker)
    assert state.devices[0].missing_bytes == {NAME: 0}
    bench.dispatcher.rest(NAME, 0)
    assert state.devices[0].missing_bytes == {}
    bench.dispatcher.wake(NAME, bench.worker)
    assert state.devices[0].missing_bytes == {NAME: 0}


async def test_a_worker_that_has_the_model_no_more(bench: Bench) -> None:
    bench.dispatcher.host(Targets(), loaded(NAME), None, bench.worker)  # anew: no second route
    assert bench.fleet.availability(NAME).devices == (0,)
    bench.dispatcher.unhost(NAME, bench.worker)
    bench.dispatcher.unhost(NAME, bench.worker)
    assert bench.fleet.availability(NAME).devices == ()
    bench.ask("a")
    [refused] = bench.frontend.refusals
    assert (refused.status, refused.retry_after_s) == (503, 1.0)
    assert "cannot be served right now" in refused.message
    bench.check()


async def test_the_dead_are_sent_nothing(bench: Bench) -> None:
    """Two wait for the KV room of one on a worker that dies: all three go on later."""
    bench.cold.warm.add(NAME)
    bench.dispatcher.worker_down(bench.worker, "restarted")
    bench.come_back(device_bytes=WEIGHT_BYTES + 2000, kv_host_bytes=0)
    for request_id in ("a", "b", "c"):
        bench.ask(request_id)
    assert [one.device for one in bench.dispatcher.live.all()] == [0, None, None]
    bench.dispatcher.worker_down(bench.worker, "died")
    assert [one.device for one in bench.dispatcher.live.all()] == [None] * 3
    bench.check()
    bench.come_back()
    assert [one.device for one in bench.dispatcher.live.all()] == [0] * 3
    bench.check()


async def test_a_request_is_cancelled_by_hand(bench: Bench) -> None:
    bench.cold.warm.add(NAME)
    bench.ask("a")
    bench.ask("b")
    [request] = bench.dispatcher.cancel("a", "cancelled by the operator")
    assert request.request_id == "a"
    [failed] = [one for one in bench.frontend.sent if isinstance(one, m.RequestsFailed)]
    assert (failed.request_ids, failed.message) == (["a"], "cancelled by the operator")
    assert (failed.status, failed.code) == (422, "request_cancelled")
    assert list(bench.scheduled) == ["b"]
    with pytest.raises(NoSuchRequest, match="'a'"):
        bench.dispatcher.cancel("a", "again")
    bench.check()


async def test_an_id_that_is_taken_is_refused_alone(history: History) -> None:
    bench = Bench(history)
    bench.cold.warm.add(NAME)
    bench.ask("r1")
    bench.ask("r1")
    [refusal] = bench.frontend.refusals
    assert (refusal.request_id, refusal.status) == ("r1", 503)
    assert "Please send the request again" in refusal.message
    assert len(bench.dispatcher.live) == 1
    assert list(bench.scheduled) == ["r1"]


async def test_an_answers_id_cancels_its_request(history: History) -> None:
    bench = Bench(history)
    bench.ask("r1")
    [ended] = bench.dispatcher.cancel("chatcmpl-r1", "by hand")
    assert ended.request_id == "r1"
    assert len(bench.dispatcher.live) == 0


def test_the_id_of_an_answer_cancels_all_samples(bench: Bench) -> None:
    http_id = RequestIds().http_id
    mine = [f"0_{http_id}", f"{http_id}-2"]
    for request_id in (*mine, f"0_{RequestIds().http_id}"):
        bench.ask(request_id)
    ended = bench.dispatcher.cancel(f"chatcmpl-{http_id}", "by hand")
    assert [one.request_id for one in ended] == mine
    assert len(bench.dispatcher.live) == 1
