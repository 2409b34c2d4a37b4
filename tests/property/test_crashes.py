"""Requests that crash workers end alone, however requests are spread over workers and models."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import cast

from hypothesis import event, given, settings, strategies as st

from gpupool_state import History
from gpupoold.config.sections import DeviceSettings, LimitSettings
from gpupoold.control.live_requests import LiveRequest
from gpupoold.control.processes.supervised import Death, candidates_of
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import DeviceFacts, Targets
from gpupoold.scheduling.invariants import check_state
from gpupoold.scheduling.policies.named import PolicyOptions, make_policy
from gpupoold.system.activity import Activity, ThreadPhase, digest
from gpupoold.wire import messages as m
from tests.unit.control.fleet_box import FleetBox, settings_with
from tests.unit.control.loaded import WEIGHT_BYTES, loaded

MODELS = ("one", "two")
NUM_WORKERS = 2
NUM_TOKENS = 9
CRASH = "signal 11"
# More steps than any run needs in which every request gets its tokens.
MAX_STEPS = 2_000


class Nothing:
    """A history that keeps nothing."""

    def record_request(self, _: object) -> None:
        pass

    def record_event(self, *_: object) -> None:
        pass


@dataclass
class Clients:
    """What became of each request; plays the frontend."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    errors: dict[str, str] = field(default_factory=dict)

    def send(self, message: m.Message) -> None:
        match message:
            case m.AdmissionAnswer():
                assert message.status == 200
            case m.RequestsFailed():
                self.errors |= dict.fromkeys(message.request_ids, message.message)
            case m.StepOutputs():
                for item in message.progress:
                    self.tokens.setdefault(item.request_id, []).extend(item.new_token_ids)
                    if item.finish_reason is not None:
                        self.whole.add(item.request_id)


@dataclass(frozen=True)
class Poison:
    """A request that ends its worker in a phase, from so many tokens on."""

    phase: ThreadPhase
    num_tokens: int = 0


class Box:
    """A dispatcher, and workers that crash when they do what a poisonous request asks for.

    A worker steps the requests of one model, or an isolated one alone, and compiles the grammars
    of requests that are new to it beside another model's step, but for isolated ones.
    """

    def __init__(self, poisons: dict[str, Poison]) -> None:
        limits, policy = LimitSettings(), make_policy("gpupool", PolicyOptions())
        self.clients, self.box = Clients(), FleetBox(MODELS)
        for name in MODELS:
            self.box.warm.add(name)
        self.dispatcher = Dispatcher(
            settings_with(limits),
            cast(History, Nothing()),
            policy,
            self.box.fleet,
            lambda _, message: self.clients.send(message),
        )
        self.poisons = poisons
        self.num_deaths = 0
        self.was_added: dict[int, set[str]] = {number: set() for number in range(NUM_WORKERS)}
        self.was_isolated: dict[tuple[int, str], bool] = {}
        self.workers = [
            Worker(number, DeviceSettings(kind="emulated")) for number in range(NUM_WORKERS)
        ]
        for number in range(NUM_WORKERS):
            self.come_up(number)

    def come_up(self, number: int) -> None:
        worker = self.workers[number]
        room = 2 * WEIGHT_BYTES + 4_000_000
        worker.ready = m.WorkerReady(DeviceFacts(room, 4096, 1e9), "0.32.0")
        self.dispatcher.worker_up(worker)
        for name in MODELS:
            self.dispatcher.host(Targets(), loaded(name), None, worker)
        self.box.come_up(number)

    def ask(self, request_id: str, model: str) -> None:
        request = m.AddRequest(model, request_id, time.monotonic(), 3, NUM_TOKENS, [b""])
        self.dispatcher.from_frontend(request)

    def run(self, number: int, model: str) -> None:
        """What a worker does of a model: add what is new, then a step."""
        here = [one for one in self.dispatcher.live.on_device(number) if one.model == model]
        for request in here:
            if request.request_id not in self.was_added[number] and not self.add(number, request):
                return
        isolated = [one for one in here if one.is_isolated]
        others = [one for one in here if not one.is_isolated]
        was_isolated = self.was_isolated.get((number, model), False)
        is_isolated = bool(isolated) and not (was_isolated and others)
        self.was_isolated[number, model] = is_isolated
        batch = isolated[:1] if is_isolated else others
        ids = frozenset(digest(one.request_id) for one in batch)
        if any(self.is_poison(one, ThreadPhase.STEP) for one in batch):
            self.die(number, Activity(ThreadPhase.STEP, model, ids))
            return
        if batch:
            self.give_tokens(number, model, batch)
        self.end_turn(number)

    def end_turn(self, number: int) -> None:
        """Let the core choose whose turn it is next."""
        turn = self.dispatcher.state.devices[number].turn
        if turn is not None:
            now_s = time.monotonic()
            ended = m.TurnReport(turn.turn_id, turn.model, now_s, now_s, {})
            self.dispatcher.from_worker(self.workers[number], ended)

    def add(self, number: int, request: LiveRequest) -> bool:
        """Add a request to a worker; whether the worker survives."""
        self.was_added[number].add(request.request_id)
        model, ids = request.model, frozenset({digest(request.request_id)})
        if self.is_poison(request, ThreadPhase.ADD_REQUEST):
            self.die(number, Activity(ThreadPhase.ADD_REQUEST, model, ids))
            return False
        if self.is_poison(request, ThreadPhase.GRAMMAR):
            beside = [] if request.is_isolated else self.steps_of_others(number, request)
            self.die(number, Activity(ThreadPhase.GRAMMAR, model, ids), *beside)
            return False
        return True

    def steps_of_others(self, number: int, but: LiveRequest) -> list[Activity]:
        here = self.dispatcher.live.on_device(number)
        others = [one for one in here if one.model != but.model and not one.is_isolated]
        ids = frozenset(digest(one.request_id) for one in others)
        return [Activity(ThreadPhase.STEP, others[0].model, ids)] if others else []

    def is_poison(self, request: LiveRequest, phase: ThreadPhase) -> bool:
        poison = self.poisons.get(request.request_id)
        if poison is None or poison.phase is not phase:
            return False
        return len(request.output_token_ids) >= poison.num_tokens

    def die(self, number: int, *activities: Activity, is_at_fault: bool = True) -> None:
        self.num_deaths += is_at_fault
        here = self.dispatcher.live.on_device(number)
        death = Death(CRASH, is_at_fault, activities)
        candidates = candidates_of(death, {one.request_id: one.model for one in here})
        self.was_added[number].clear()
        self.dispatcher.worker_down(self.workers[number], CRASH, candidates)
        self.come_up(number)

    def give_tokens(self, number: int, model: str, batch: list[LiveRequest]) -> None:
        progress = []
        for one in batch:
            num_tokens = len(one.output_token_ids) + 1
            finish = "length" if num_tokens == NUM_TOKENS else None
            progress.append(m.RequestProgress(one.request_id, [num_tokens], finish))
        outputs = m.StepOutputs(model, time.monotonic(), [], progress, 0.01)
        self.dispatcher.from_worker(self.workers[number], outputs)


POISON = st.sampled_from(
    [Poison(ThreadPhase.ADD_REQUEST), Poison(ThreadPhase.GRAMMAR)]
) | st.builds(Poison, st.just(ThreadPhase.STEP), st.integers(0, NUM_TOKENS - 1))
REQUEST = st.tuples(st.sampled_from(MODELS), st.none() | st.none() | POISON)
STEP = st.tuples(st.integers(0, NUM_WORKERS - 1), st.sampled_from(MODELS), st.integers(0, 30))


@settings(max_examples=150)
@given(st.lists(REQUEST, min_size=1, max_size=12), st.lists(STEP, max_size=60))
def test_exactly_the_poisonous_requests_end(
    requests: list[tuple[str, Poison | None]], steps: list[tuple[int, str, int]]
) -> None:
    names = {str(number): model for number, (model, _) in enumerate(requests)}
    poisons = {str(n): poison for n, (_, poison) in enumerate(requests) if poison is not None}
    box = Box(poisons)
    waiting = list(names)
    for number, model, what in steps:
        if what < 10 and waiting:
            request_id = waiting.pop(0)
            box.ask(request_id, names[request_id])
        elif what == 10:
            box.die(number, is_at_fault=False)
        else:
            box.run(number, model)
        check_state(box.dispatcher.state)
    for request_id in waiting:
        box.ask(request_id, names[request_id])
    for turn in range(MAX_STEPS):
        if not len(box.dispatcher.live):
            break
        box.run(turn % NUM_WORKERS, MODELS[turn // NUM_WORKERS % len(MODELS)])
        box.dispatcher.tick(time.monotonic())
    event(f"{box.num_deaths} deaths of {len(poisons)} poisonous requests")
    assert set(box.clients.errors) == set(poisons)
    assert box.clients.whole == set(names) - set(poisons)
    for request_id in box.clients.whole:
        assert box.clients.tokens[request_id] == list(range(1, NUM_TOKENS + 1))
    # One that makes it a suspect, or another's, and one alone.
    assert box.num_deaths <= 2 * len(poisons)
