"""Requests whose worker dies, or that get no token for too long."""

from __future__ import annotations

import time

import pytest

from gpupoold.config.sections import LimitSettings
from gpupoold.control.processes.supervised import NOBODY
from gpupoold.control.requests.core_shell import PASSED_TOKENS
from gpupoold.control.workers.worker import Worker
from gpupoold.wire import messages as m
from tests.unit.control.loaded import WEIGHT_BYTES
from tests.unit.control.requests.dispatcher_bench import NAME, Bench, due_to


class TestDeadWorker:
    """What a worker had goes on elsewhere, or there when it is back."""

    @pytest.fixture
    def sent(self, monkeypatch: pytest.MonkeyPatch) -> list[m.AddRequest]:
        """Requests that workers were sent."""
        sent: list[m.AddRequest] = []

        def send(_: Worker, message: m.Message, fds: tuple[int, ...] = ()) -> None:
            if isinstance(message, m.AddRequest):
                sent.append(message)

        monkeypatch.setattr(Worker, "send", send)
        return sent

    def give_tokens(self, bench: Bench, request_id: str, *token_ids: int) -> None:
        progress = [m.RequestProgress(request_id, list(token_ids))]
        at_s = time.monotonic()
        outputs = m.StepOutputs(NAME, at_s, [], progress, 0.01)
        bench.dispatcher.from_worker(bench.worker, outputs)

    async def test_they_go_on_after_the_tokens_they_had(
        self, bench: Bench, sent: list[m.AddRequest]
    ) -> None:
        bench.cold.warm.add(NAME)
        bench.ask("a", 1.0)
        [first] = sent
        assert first.output_token_ids == []
        self.give_tokens(bench, "a", 7, 8)
        self.give_tokens(bench, "a", 9)
        bench.frontend.sent.clear()
        bench.dispatcher.worker_down(bench.worker, "died")
        assert bench.frontend.sent == []
        assert bench.scheduled["a"].arrival_s == 1.0
        assert bench.dispatcher.live.all()[0].device is None
        bench.come_back()
        again = sent[-1]
        assert (len(sent), again.output_token_ids) == (2, [7, 8, 9])
        assert (again.frames, again.num_prompt_tokens) == (first.frames, first.num_prompt_tokens)
        bench.check()

    async def test_who_crashes_a_worker_twice_the_second_time_alone_ends(
        self, bench: Bench, sent: list[m.AddRequest]
    ) -> None:
        bench.cold.warm.add(NAME)
        bench.ask("a")
        bench.ask("b")
        bench.dispatcher.worker_down(bench.worker, "died", due_to("a", "b"))
        bench.come_back()
        bench.ask("c")
        assert bench.frontend.sent == []
        again = {one.request_id: one.is_isolated for one in sent[2:]}
        assert again == {"a": True, "c": False}
        assert bench.dispatcher.live["b"].is_held
        sent.clear()
        bench.dispatcher.worker_down(bench.worker, "died again", due_to("a"))
        bench.come_back()
        [failed] = bench.frontend.sent
        assert isinstance(failed, m.RequestsFailed)
        assert failed.request_ids == ["a"]
        assert "when retried alone: died again" in failed.message
        # Neither clients' libraries nor batches repeat it.
        assert (failed.status, failed.code) == (422, "request_crashed_worker")
        assert {one.request_id: one.is_isolated for one in sent} == {"b": True, "c": False}
        bench.check()

    async def test_who_gets_past_the_crash_is_with_others_again(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[m.Message] = []
        monkeypatch.setattr(Worker, "send", lambda _, message, fds=(): told.append(message))
        bench.cold.warm.add(NAME)
        bench.ask("a")
        bench.ask("b")
        bench.dispatcher.worker_down(bench.worker, "died", due_to("a", "b"))
        bench.come_back()
        self.give_tokens(bench, "a", *range(PASSED_TOKENS))
        ended = [one for one in told if isinstance(one, m.EndIsolation)]
        assert ended == [m.EndIsolation(NAME, "a")]
        last = next(one for one in reversed(told) if isinstance(one, m.AddRequest))
        assert (last.request_id, last.is_isolated) == ("b", True)
        bench.check()

    async def test_suspects_may_leave_and_be_ended(
        self, bench: Bench, sent: list[m.AddRequest]
    ) -> None:
        bench.cold.warm.add(NAME)
        for request_id in "abc":
            bench.ask(request_id)
        bench.dispatcher.worker_down(bench.worker, "died", due_to("a", "b", "c"))
        bench.come_back()
        bench.dispatcher.from_frontend(m.AbortRequests(NAME, ["a", "b"]))
        bench.dispatcher.tick(time.monotonic())
        assert sent[-1].request_id == "c"
        bench.dispatcher.fail_model(NAME, "removed")
        assert len(bench.dispatcher.live) == 0
        bench.check()

    async def test_who_is_no_candidate_goes_on_for_ever(
        self, bench: Bench, sent: list[m.AddRequest]
    ) -> None:
        bench.cold.warm.add(NAME)
        bench.ask("a")
        for candidates in (NOBODY, due_to("another"), NOBODY, due_to("another")):
            bench.dispatcher.worker_down(bench.worker, "died", candidates)
            bench.come_back()
        assert bench.frontend.sent == []
        assert [one.request_id for one in sent] == ["a"] * 5
        bench.check()

    async def test_none_is_left_to_come_back(self, bench: Bench, sent: list[m.AddRequest]) -> None:
        bench.cold.warm.add(NAME)
        bench.ask("a")
        bench.dispatcher.worker_down(bench.worker, "died")
        bench.dispatcher.fail_unhosted("died when it started")
        assert bench.frontend.sent == [m.RequestsFailed(NAME, ["a"], "died when it started")]
        assert (bench.scheduled, len(bench.dispatcher.live)) == ({}, 0)
        bench.check()

    async def test_one_that_leaves_meanwhile(self, bench: Bench, sent: list[m.AddRequest]) -> None:
        bench.cold.warm.add(NAME)
        bench.ask("a")
        bench.dispatcher.worker_down(bench.worker, "died")
        bench.dispatcher.from_frontend(m.AbortRequests(NAME, ["a"]))
        bench.come_back()
        assert [one.request_id for one in sent] == ["a"]
        assert bench.scheduled == {}
        bench.check()

    async def test_what_is_not_warm_is_warmed_before_they_go_on(
        self, bench: Bench, sent: list[m.AddRequest]
    ) -> None:
        bench.cold.warm.add(NAME)
        bench.ask("a")
        self.give_tokens(bench, "a", 7)
        bench.add_worker()  # else nobody could warm it now
        bench.cold.warm.clear()
        bench.dispatcher.worker_down(bench.worker, "died")
        assert (bench.cold.begun, bench.dispatcher.live.num_waiting(NAME)) == ([NAME], 1)
        bench.come_back()
        assert len(sent) == 1
        bench.cold.warm.add(NAME)
        bench.dispatcher.go_on(NAME)
        assert [one.output_token_ids for one in sent] == [[], [7]]
        bench.check()


class TestBound:
    """A request that gets no token for too long ends, and is told what it waited for."""

    LIMIT_S = LimitSettings().token_timeout_s

    def errors(self, bench: Bench) -> dict[str, str]:
        failed = [one for one in bench.frontend.sent if isinstance(one, m.RequestsFailed)]
        return {request_id: one.message for one in failed for request_id in one.request_ids}

    async def test_from_its_arrival_or_its_last_token_on(self, bench: Bench) -> None:
        bench.cold.warm.add(NAME)
        bench.ask("a", 100.0)
        bench.ask("b", 100.0)
        progress = [m.RequestProgress("b", [7])]
        outputs = m.StepOutputs(NAME, 150.0, [], progress, 0.01)
        bench.dispatcher.from_worker(bench.worker, outputs)
        bench.dispatcher.end_overdue(100.0 + self.LIMIT_S)
        assert self.errors(bench) == {}
        bench.dispatcher.end_overdue(101.0 + self.LIMIT_S)
        assert list(self.errors(bench)) == ["a"]
        bench.dispatcher.end_overdue(151.0 + self.LIMIT_S)
        assert list(self.errors(bench)) == ["a", "b"]
        assert len(bench.dispatcher.live) == 0
        bench.check()

    async def test_each_is_told_what_it_waited_for(self, bench: Bench) -> None:
        bench.ask("cold", 100.0)
        bench.cold.warm.add(NAME)
        bench.ask("there", 100.0)
        bench.dispatcher.end_overdue(1000.0)
        bench.ask("homeless", 1000.0)
        bench.dispatcher.worker_down(bench.worker, "died")
        bench.dispatcher.end_overdue(2000.0)
        assert self.errors(bench) == {
            "cold": f"no token for 600 s: {NAME} is not in host memory yet",
            "there": "no token for 600 s: device 0 is running the request but does not respond",
            "homeless": f"no token for 600 s: no device has {NAME} now",
        }

    async def test_two_that_wait_for_room_and_for_a_turn(self, bench: Bench) -> None:
        bench.cold.warm.add(NAME)
        bench.dispatcher.worker_down(bench.worker, "restarted")
        bench.come_back(device_bytes=WEIGHT_BYTES + 2000, kv_host_bytes=0)
        bench.ask("first", 100.0)
        bench.ask("second", 100.0)
        turn = bench.dispatcher.state.devices[0].turn
        assert turn is not None
        report = m.TurnReport(turn.turn_id, turn.model, None, 0.0, {})
        bench.dispatcher.from_worker(bench.worker, report)
        bench.dispatcher.end_overdue(1000.0)
        assert self.errors(bench)["second"] == "no token for 600 s: no device has taken the request"
