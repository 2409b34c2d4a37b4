"""Bounds of live requests hold and their counters do not leak, whatever becomes of requests."""

from __future__ import annotations

import time
from typing import cast

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpupool_state import History
from gpupoold.config.sections import DeviceSettings, LimitSettings
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import DeviceFacts, Targets
from gpupoold.scheduling.invariants import check_state
from gpupoold.scheduling.policies.named import PolicyOptions, make_policy
from gpupoold.wire import messages as m
from tests.unit.control.fleet_box import FleetBox, settings_with
from tests.unit.control.loaded import loaded

PER_MODEL, IN_ALL = 3, 7
MODELS = ("a", "b", "c")
WHICH = st.integers(0, 50)


class Unwritten:
    """A history that forgets."""

    def record_request(self, row: object) -> None:
        """Forget it."""

    def record_event(self, *row: object) -> None:
        """Forget it."""


class Device(Worker):
    """A worker without a process: it has what it was sent."""

    def __init__(self, number: int) -> None:
        super().__init__(number, DeviceSettings(kind="emulated"))
        self.ready = m.WorkerReady(DeviceFacts(1 << 40, 4096, 1e9), "0.32.0")
        self.has: dict[str, m.AddRequest] = {}
        self.turn: m.RunTurn | None = None

    def send(self, message: m.Message, fds: tuple[int, ...] = ()) -> None:
        """Take a request, or forget some."""
        match message:
            case m.AddRequest():
                self.has[message.request_id] = message
            case m.AbortRequests():
                for request_id in message.request_ids:
                    self.has.pop(request_id, None)


class Clients:
    """The frontends' side: who waits for an answer, and what became of the others."""

    def __init__(self) -> None:
        self.frontend_of: dict[str, int] = {}
        self.asked: list[str] = []
        self.open: dict[str, str] = {}
        self.refusals: list[m.AdmissionAnswer] = []

    def send(self, number: int, message: m.Message) -> None:
        """The daemon says something to one of them, whose requests it is about."""
        match message:
            case m.AdmissionAnswer():
                assert self.frontend_of[message.request_id] == number
                self.asked.remove(message.request_id)
                if message.status == 200:
                    self.open[message.request_id] = message.model
                else:
                    self.refusals.append(message)
            case m.StepOutputs():
                for one in message.progress:
                    assert self.frontend_of[one.request_id] == number
                    if one.finish_reason is not None:
                        self.open.pop(one.request_id, None)
            case m.RequestsFailed():
                for request_id in message.request_ids:
                    assert self.frontend_of[request_id] == number
                    self.open.pop(request_id, None)


class AdmissionMachine(RuleBasedStateMachine):
    """Arrivals, ends, aborts and losses in any order."""

    drop_late = False

    def __init__(self) -> None:
        super().__init__()
        limits = LimitSettings(
            max_live_requests_per_model=PER_MODEL,
            max_live_requests=IN_ALL,
            drop_late=self.drop_late,
        )
        policy = make_policy("gpupool", PolicyOptions())
        self.clients, self.box = Clients(), FleetBox(MODELS, Targets(1.0, 0.1))
        for name in set(MODELS) - {"c"}:
            self.box.warm.add(name)
        self.dispatcher = Dispatcher(
            settings_with(limits),
            cast(History, Unwritten()),
            policy,
            self.box.fleet,
            self.clients.send,
        )
        self.devices = [Device(0), Device(1)]
        self.down: list[Device] = []
        self.num_asked = 0
        for device in self.devices:
            self.come_up(device)

    def come_up(self, device: Device) -> None:
        device.has.clear()
        self.dispatcher.worker_up(device)
        for name in MODELS:
            self.dispatcher.host(Targets(1.0, 0.1), loaded(name), None, device)
        self.box.come_up(device.number)

    @rule(
        which=st.sampled_from(MODELS),
        count=st.integers(1, 6),
        ago_s=st.floats(0, 3),
        frontend=st.integers(0, 1),
    )
    def arrive(self, which: str, count: int, ago_s: float, frontend: int) -> None:
        """A burst, or the samples of one request."""
        for _ in range(count):
            self.num_asked += 1
            request_id = f"r{self.num_asked}"
            num_before = len(self.clients.refusals)
            is_full = self.num_of(which) >= PER_MODEL or len(self.clients.open) >= IN_ALL
            self.clients.asked.append(request_id)
            arrival_s = time.monotonic() - ago_s
            self.clients.frontend_of[request_id] = frontend
            request = m.AddRequest(which, request_id, arrival_s, 10, 20, [], frontend=frontend)
            self.dispatcher.from_frontend(request)
            assert self.clients.asked == []
            refused = self.clients.refusals[num_before:]
            assert (
                bool(refused) == is_full
                or self.drop_late
                or not self.box.fleet.availability(which).devices
            )
            assert all(one.retry_after_s >= 0 for one in refused)

    @rule(which=WHICH, num_steps=st.integers(1, 3), ends=st.booleans())
    def step(self, which: int, num_steps: int, ends: bool) -> None:
        device = self.devices[which % len(self.devices)]
        if device in self.down or not device.has:
            return
        model = next(iter(device.has.values())).model
        ids = [one.request_id for one in device.has.values() if one.model == model]
        for left in reversed(range(num_steps)):
            reason = "length" if ends and not left else None
            progress = [m.RequestProgress(request_id, [7], reason) for request_id in ids]
            outputs = m.StepOutputs(model, time.monotonic(), [], progress, 0.01)
            if reason:
                for request_id in ids:
                    del device.has[request_id]
            self.dispatcher.from_worker(device, outputs)

    @rule(which=WHICH)
    def end_turn(self, which: int) -> None:
        device = self.devices[which % len(self.devices)]
        if device in self.down:
            return
        turn = self.dispatcher.state.devices[device.number].turn
        if turn is not None:
            report = m.TurnReport(turn.turn_id, turn.model, None, 0.0, {})
            self.dispatcher.from_worker(device, report)

    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        """A client leaves; the word of it may come twice, or after the end."""
        ids = sorted(self.clients.open) or ["unknown"]
        request_id = ids[which % len(ids)]
        model = self.clients.open.pop(request_id, "a")
        for _ in range(2):
            self.dispatcher.from_frontend(m.AbortRequests(model, [request_id]))

    @rule(which=WHICH)
    def fail(self, which: int) -> None:
        """An engine refuses a request that it has."""
        device = self.devices[which % len(self.devices)]
        if device.has and device not in self.down:
            request_id = sorted(device.has)[which % len(device.has)]
            failed = m.RequestsFailed(device.has.pop(request_id).model, [request_id], "no")
            self.dispatcher.from_worker(device, failed)

    @rule(which=WHICH)
    def die(self, which: int) -> None:
        device = self.devices[which % len(self.devices)]
        if device not in self.down:
            self.down.append(device)
            self.dispatcher.worker_down(device, "it died")

    @precondition(lambda self: self.down)
    @rule()
    def come_back(self) -> None:
        self.come_up(self.down.pop())

    @rule(is_warm=st.booleans(), fails=st.booleans())
    def warm(self, is_warm: bool, fails: bool) -> None:
        (self.box.warm.add if is_warm else self.box.warm.discard)("c")
        if fails:
            self.dispatcher.fail_waiting("c", "no room")
        elif is_warm:
            self.dispatcher.go_on("c")

    @rule(which=st.sampled_from(MODELS))
    def fail_model(self, which: str) -> None:
        self.dispatcher.fail_model(which, "damaged")

    @rule()
    def tick(self) -> None:
        self.dispatcher.tick(time.monotonic())

    @rule(number=st.integers(0, 1))
    def frontend_dies(self, number: int) -> None:
        """Its requests end, and no others: see the invariant."""
        for request_id in list(self.clients.open):
            if self.clients.frontend_of[request_id] == number:
                del self.clients.open[request_id]
        self.dispatcher.frontend_down(number)

    @invariant()
    def counters_are_what_clients_wait_for(self) -> None:
        live = self.dispatcher.live
        assert {one.request_id: one.model for one in live.all()} == self.clients.open
        assert len(live) == len(self.clients.open) <= IN_ALL
        for name in MODELS:
            assert live.num_of(name) == self.num_of(name) <= PER_MODEL
        check_state(self.dispatcher.state)

    def num_of(self, name: str) -> int:
        return sum(model == name for model in self.clients.open.values())

    def teardown(self) -> None:
        """When all have ended, nothing is left."""
        for request_id, model in list(self.clients.open.items()):
            del self.clients.open[request_id]
            self.dispatcher.from_frontend(m.AbortRequests(model, [request_id]))
        assert len(self.dispatcher.live) == 0
        assert self.dispatcher.state.requests == {}
        assert not any(self.dispatcher.live.num_waiting(name) for name in MODELS)


class DroppingMachine(AdmissionMachine):
    """The same where requests are dropped that it is too late for."""

    drop_late = True


AdmissionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
DroppingMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestAdmission = AdmissionMachine.TestCase
TestDropping = DroppingMachine.TestCase
