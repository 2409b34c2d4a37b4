"""Requests of models that have to be warmed: they wait, leave, go on or fail."""

from __future__ import annotations

import time

import pytest

from gpupool_state import History
from gpupoold.config.schema import DeviceSettings, LimitSettings
from gpupoold.control.processes.crash_attribution import NOBODY, Candidates
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.requests.suspects import PASSED_TOKENS
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import FinishReason, Targets
from gpupoold.errors import NoSuchRequest
from gpupoold.scheduling.policies.named import PolicyOptions, make_policy
from gpupoold.scheduling.state import Request
from gpupoold.wire import messages as m
from tests.unit.control.fleet_box import FleetBox
from tests.unit.control.loaded import WEIGHT_BYTES, loaded

NAME = "llama"


def due_to(*request_ids: str) -> Candidates:
    return Candidates(frozenset(request_ids))


class Cold:
    """What is told of models' use, and which are warm."""

    def __init__(self, box: FleetBox) -> None:
        self.warm = box.warm
        self.begun: list[str] = []
        self.uses: list[str] = []
        signals = box.fleet.signals
        signals.weights_wanted.connect(self.begun.append)
        signals.request_began.connect(lambda model: self.uses.append(f"used {model}"))
        signals.request_ended.connect(lambda model: self.uses.append(f"left {model}"))
        signals.weights_damaged.connect(lambda one: self.uses.append(f"damaged {one.model}"))


class Frontend:
    """Keeps what it is sent, and whom the daemon did not take."""

    def __init__(self) -> None:
        self.sent: list[m.Message] = []
        self.refusals: list[m.AdmissionAnswer] = []

    def send(self, message: m.Message) -> None:
        if not isinstance(message, m.AdmissionAnswer):
            self.sent.append(message)
        elif message.status != 200:
            self.refusals.append(message)


class Bench:
    """A dispatcher with one worker that has a model without a snapshot."""

    def __init__(self, history: History, *, drop_late: bool = False) -> None:
        limits = LimitSettings(max_live_requests_per_model=3, drop_late=drop_late)
        policy = make_policy("gpupool", PolicyOptions())
        self.box = FleetBox([NAME])
        self.fleet = self.box.fleet
        self.dispatcher = Dispatcher(limits, history, policy, self.fleet, self.send)
        self.cold, self.frontend = Cold(self.box), Frontend()
        self.others: dict[int, Frontend] = {}
        self.worker = Worker(0, DeviceSettings(kind="emulated"))
        self.come_back()

    def come_back(self, device_bytes: int = 1 << 30, kv_host_bytes: int | None = None) -> None:
        self.worker.ready = m.WorkerReady(
            0, 1, device_bytes, 4096, 1e9, "0.32.0", kv_host_bytes=kv_host_bytes
        )
        self.dispatcher.worker_up(self.worker)
        self.dispatcher.host(Targets(), loaded(NAME), None, self.worker)
        self.box.come_up(self.worker.number)

    def add_worker(self) -> None:
        """Another worker with the model."""
        worker = Worker(1, DeviceSettings(kind="emulated"))
        worker.ready = m.WorkerReady(1, 1, 1 << 30, 4096, 1e9, "0.32.0")
        self.dispatcher.worker_up(worker)
        self.dispatcher.host(Targets(), loaded(NAME), None, worker)
        self.box.come_up(1)

    def send(self, number: int, message: m.Message) -> None:
        """To the frontend 0, or another one."""
        others = self.others.setdefault(number, Frontend())
        (others if number else self.frontend).send(message)

    def ask(self, request_id: str, arrival_s: float | None = None, frontend: int = 0) -> None:
        arrival_s = time.monotonic() if arrival_s is None else arrival_s
        message = m.AddRequest(NAME, request_id, arrival_s, 2, 8, [b""], frontend=frontend)
        self.dispatcher.from_frontend(message)

    @property
    def scheduled(self) -> dict[str, Request]:
        """What the scheduling core knows."""
        return self.dispatcher.scheduler.state.requests

    def check(self) -> None:
        self.dispatcher.scheduler.check_state()


@pytest.fixture
def bench(history: History) -> Bench:
    return Bench(history)


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
    assert bench.frontend.sent == [m.StepOutputs(NAME, 5.0, [b"of a", b"more"], [a])]
    assert bench.others[1].sent == [m.StepOutputs(NAME, 5.0, [b"of b"], [b])]
    bench.ask("c", frontend=1)
    bench.dispatcher.from_worker(bench.worker, m.RequestsFailed(NAME, ["a", "c", "b"], "no"))
    assert bench.frontend.sent[1:] == [m.RequestsFailed(NAME, ["a"], "no")]
    assert bench.others[1].sent[1:] == [m.RequestsFailed(NAME, ["c"], "no")]
    for number in range(4):
        bench.ask(f"full {number}", frontend=2)
    assert [one.request_id for one in bench.others[2].refusals] == ["full 3"]
    bench.dispatcher.fail_model(NAME, "damaged")
    assert len(bench.frontend.sent) == len(bench.others[1].sent) == 2
    [failed] = bench.others[2].sent
    assert isinstance(failed, m.RequestsFailed)
    assert failed.request_ids == ["full 0", "full 1", "full 2"]


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
        turn = bench.dispatcher.scheduler.state.devices[0].turn
        assert turn is not None
        report = m.TurnReport(turn.turn_id, turn.model, None, 0.0, {})
        bench.dispatcher.from_worker(bench.worker, report)
        bench.dispatcher.end_overdue(1000.0)
        assert self.errors(bench)["second"] == "no token for 600 s: no device has taken the request"


async def test_a_request_is_cancelled_by_hand(bench: Bench) -> None:
    bench.cold.warm.add(NAME)
    bench.ask("a")
    bench.ask("b")
    request = bench.dispatcher.cancel("a", "cancelled by the operator")
    assert request.request_id == "a"
    [failed] = [one for one in bench.frontend.sent if isinstance(one, m.RequestsFailed)]
    assert (failed.request_ids, failed.message) == (["a"], "cancelled by the operator")
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
    assert bench.dispatcher.cancel("chatcmpl-r1", "by hand").request_id == "r1"
    assert len(bench.dispatcher.live) == 0
