"""Whatever happens, no client waits longer than the bound for a token or an error."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import cast

from hypothesis import given, settings, strategies as st

from gpupool_state import History
from gpupoold.config.sections import DeviceSettings, LimitSettings
from gpupoold.control.processes.supervised import Candidates
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import DeviceFacts, Targets
from gpupoold.scheduling.invariants import check_state
from gpupoold.scheduling.policies.named import PolicyOptions, make_policy
from gpupoold.wire import messages as m
from tests.unit.control.fleet_box import FleetBox, settings_with
from tests.unit.control.loaded import WEIGHT_BYTES, loaded

LIMIT_S = 10.0
SWEEP_S = 1.0
MODELS = ("one", "two")
NUM_INSTANCES = 2


class Nothing:
    """A history that keeps nothing."""

    def record_request(self, _: object) -> None:
        pass

    def record_event(self, *_: object) -> None:
        pass


class Clients:
    """When each live request was last heard of; plays the frontend."""

    def __init__(self) -> None:
        self.heard_s: dict[str, float] = {}
        self.errors: dict[str, str] = {}
        self.now_s = time.monotonic()

    def send(self, message: m.Message) -> None:
        match message:
            case m.AdmissionAnswer() if message.status != HTTPStatus.OK:
                del self.heard_s[message.request_id]
                self.errors[message.request_id] = message.message
            case m.RequestsFailed():
                for request_id in message.request_ids:
                    del self.heard_s[request_id]
                    self.errors[request_id] = message.message
            case m.StepOutputs():
                for item in message.progress:
                    self.heard_s[item.request_id] = message.at_s


class ControlPlane:
    """A dispatcher whose workers die, hang and come back as the test says."""

    def __init__(self) -> None:
        policy = make_policy("gpupool", PolicyOptions())
        limits = LimitSettings(token_timeout=LIMIT_S)
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
        self.workers = [
            Worker(number, DeviceSettings(kind="emulated")) for number in range(NUM_INSTANCES)
        ]
        self.up: set[int] = set()
        self.hung: set[int] = set()
        self._num_asked = 0
        for number in range(NUM_INSTANCES):
            self.come_up(number)

    def ask(self, model: int, num_prompt: int) -> None:
        self._num_asked += 1
        request_id, now_s = str(self._num_asked), self.clients.now_s
        self.clients.heard_s[request_id] = now_s
        request = m.AddRequest(MODELS[model], request_id, now_s, num_prompt, 8, [b""])
        self.dispatcher.from_frontend(request)

    def come_up(self, number: int) -> None:
        """With room for the KV of one request or two, and none in host memory."""
        if number in self.up:
            return
        self.up.add(number)
        worker = self.workers[number]
        worker.ready = m.WorkerReady(
            DeviceFacts(WEIGHT_BYTES + 4000, 4096, 1e9, kv_host_limit_bytes=0), "0.32.0"
        )
        self.dispatcher.worker_up(worker)
        for name in MODELS:
            self.dispatcher.host(Targets(), loaded(name), None, worker)
        self.box.come_up(number)

    def die(self, number: int, blamed: int | None) -> None:
        if number not in self.up:
            return
        self.up.discard(number)
        self.hung.discard(number)
        here = self.dispatcher.live.on_device(number)
        model = None if blamed is None else MODELS[blamed]
        candidates = frozenset(one.request_id for one in here if one.model == model)
        self.dispatcher.worker_down(self.workers[number], "died", Candidates(candidates))

    def step(self, number: int, is_last: bool) -> None:
        """A token for one request of each model there, unless it hangs."""
        if number not in self.up or number in self.hung:
            return
        for name in MODELS:
            here = [one for one in self.dispatcher.live.on_device(number) if one.model == name]
            if here:
                item = m.RequestProgress(here[0].request_id, [5], "stop" if is_last else None)
                outputs = m.StepOutputs(name, self.clients.now_s, [], [item], 0.01)
                self.dispatcher.from_worker(self.workers[number], outputs)
                if is_last:
                    del self.clients.heard_s[here[0].request_id]

    def hang(self, number: int, is_hung: bool) -> None:
        (self.hung.add if is_hung else self.hung.discard)(number)

    def cool(self, model: int, is_cold: bool) -> None:
        if is_cold:
            self.box.warm.discard(MODELS[model])
        else:
            self.box.warm.add(MODELS[model])
            self.dispatcher.go_on(MODELS[model])

    def cancel(self, nth: int) -> None:
        live = self.dispatcher.live.all()
        if live:
            one = live[nth % len(live)]
            del self.clients.heard_s[one.request_id]
            self.dispatcher.from_frontend(m.AbortRequests(one.model, [one.request_id]))

    def wait(self, num_sweeps: int) -> None:
        for _ in range(num_sweeps):
            self.clients.now_s += SWEEP_S
            self.dispatcher.end_overdue(self.clients.now_s)
            self.check()

    def check(self) -> None:
        """Nobody waits too long, and the books of all three agree on who waits."""
        for request_id, heard_s in self.clients.heard_s.items():
            assert self.clients.now_s - heard_s <= LIMIT_S, request_id
        live = {one.request_id for one in self.dispatcher.live.all()}
        assert live == set(self.clients.heard_s)
        check_state(self.dispatcher.state)


MODEL = st.integers(0, len(MODELS) - 1)
INSTANCE = st.integers(0, NUM_INSTANCES - 1)
HAPPENING = st.one_of(
    st.tuples(st.just("ask"), MODEL, st.integers(1, 60)),
    st.tuples(st.just("wait"), st.integers(1, 12)),
    st.tuples(st.just("step"), INSTANCE, st.booleans()),
    st.tuples(st.just("die"), INSTANCE, st.none() | MODEL),
    st.tuples(st.just("come_up"), INSTANCE),
    st.tuples(st.just("hang"), INSTANCE, st.booleans()),
    st.tuples(st.just("cool"), MODEL, st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
)


@settings(max_examples=200)
@given(st.lists(HAPPENING, max_size=40))
def test_no_client_waits_longer_than_the_bound(happenings: list[tuple[str, int]]) -> None:
    pool = ControlPlane()
    for name, *arguments in happenings:
        getattr(pool, name)(*arguments)
        pool.check()
    # No more tokens: everyone who still waits is told why.
    pool.wait(round((LIMIT_S + SWEEP_S) / SWEEP_S))
    assert pool.clients.heard_s == {}
    assert all(pool.clients.errors.values())
