"""The fleet under any order of events: phases and facts agree."""

from __future__ import annotations

from contextlib import ExitStack

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.fleet.states import (
    HOST_TRANSITIONS,
    HostEvent,
    HostPhase,
    Life,
    ModelPhase,
)
from gpupoold.control.processes.supervised import Death
from gpupoold.control.weights.cache import SnapshotCache
from gpupoold.errors import Failed
from tests.unit.control.fleet_box import spec_of
from tests.unit.control.loaded import loaded

NAME = "llama"
NUMBERS = st.integers(0, 1)


class FleetMachine(RuleBasedStateMachine):
    """One model that is added, loaded, lost, drained, fails, crashes and is removed."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(SnapshotCache(0))
        self.now_s = 0.0
        self.drains: list[ExitStack] = []
        self.devices: set[int] = set()
        self.is_mounted = False

    def is_registered(self) -> bool:
        return self.fleet.knows(NAME)

    @rule(fails=st.booleans(), is_known=st.booleans())
    def add(self, fails: bool, is_known: bool) -> None:
        if self.is_registered():
            return
        if not is_known:
            proposal = self.fleet.propose([NAME])
            if fails:
                self.fleet.drop_proposal(proposal)
                return
        self.fleet.register(spec_of(NAME))
        self.fleet.loading(NAME)

    @precondition(is_registered)
    @rule(number=NUMBERS)
    def load(self, number: int) -> None:
        """Loads that are refused or that a quarantine overtakes change nothing."""
        try:
            self.fleet.check_quarantine(NAME)
        except Failed:
            return
        self.fleet.loading(NAME)
        self.fleet.host(loaded(NAME), number)
        self.devices.add(number)

    @precondition(is_registered)
    @rule()
    def open(self) -> None:
        if self.fleet.loaded(NAME) is None:
            return
        is_allowed = self.fleet.breakers.reason(NAME) is None
        self.fleet.breakers.close(NAME, self.now_s)
        self.fleet.opened(NAME)
        self.is_mounted |= is_allowed

    @rule(number=NUMBERS)
    def lose_device(self, number: int) -> None:
        self.fleet.lose_device(number)
        self.devices.discard(number)

    @precondition(is_registered)
    @rule()
    def not_loaded(self) -> None:
        if not self.devices:
            if self.fleet.breakers.retry_at_s(NAME) is None:
                self.fleet.breakers.open(NAME, "no", self.now_s, is_blocking=False)
            self.fleet.fail(NAME, "no")

    @rule(number=NUMBERS, wait_s=st.floats(0.0, 100.0))
    def crash(self, number: int, wait_s: float) -> None:
        self.now_s += wait_s
        death = Death("signal 11", True)
        reason = self.fleet.breakers.record_crash(NAME, number, death, self.now_s)
        if reason is not None:
            self.fleet.fail(NAME, reason)
            self.fleet.unhost_all(NAME)
            self.fleet.unmounted(NAME)
            self.devices, self.is_mounted = set(), False

    @rule(wait_s=st.floats(0.0, 100.0))
    def retry(self, wait_s: float) -> None:
        self.now_s += wait_s
        for model in self.fleet.breakers.due(self.now_s):
            self.fleet.breakers.half_open(model)

    @precondition(is_registered)
    @rule()
    def drain(self) -> None:
        stack = ExitStack()
        stack.enter_context(self.fleet.draining(NAME))
        self.drains.append(stack)

    @precondition(lambda self: self.drains)
    @rule()
    def end_drain(self) -> None:
        self.drains.pop().close()

    @precondition(is_registered)
    @rule()
    def remove(self) -> None:
        self.fleet.unhost_all(NAME)
        self.fleet.remove(NAME)
        self.devices, self.is_mounted = set(), False
        while self.drains:
            self.drains.pop().close()

    @invariant()
    def facts_agree(self) -> None:
        now = self.fleet.availability(NAME)
        assert set(now.devices) == self.devices
        assert self.fleet.is_open(NAME) == (self.is_mounted and bool(self.devices))
        assert self.fleet.is_draining(NAME) == bool(self.drains)
        if now.phase is ModelPhase.READY:
            assert self.is_mounted
            assert self.devices
        if now.phase is ModelPhase.LOADING:
            assert not self.fleet.is_open(NAME)
        if now.phase is ModelPhase.QUARANTINED:
            assert self.fleet.breakers.is_shut_out(NAME)
        if now.phase in (ModelPhase.FAILED, ModelPhase.QUARANTINED):
            assert now.reason
        if now.can_serve:
            assert not now.reason
        assert (now.phase is ModelPhase.DRAINING) == bool(self.drains)


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=100, stateful_step_count=50)


class HostMachine(RuleBasedStateMachine):
    """Any sequence of events that the table of hosts has."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Life("llama on worker 0", HostPhase.ABSENT, HOST_TRANSITIONS)
        self.has_engine = self.has_snapshot = False

    @rule(event=st.sampled_from(HostEvent))
    def happen(self, event: HostEvent) -> None:
        before = self.life.phase
        if (before, event) not in HOST_TRANSITIONS:
            return
        self.life.move(event)
        ends = (HostEvent.UNLOAD, HostEvent.LOSE_WORKER, HostEvent.FAIL, HostEvent.LOAD)
        self.has_engine = event is HostEvent.LOADED or (self.has_engine and event not in ends)
        keeps = self.has_engine and event is not HostEvent.DETACH
        self.has_snapshot = keeps and (event is HostEvent.ATTACH or self.has_snapshot)

    @invariant()
    def snapshots_are_of_engines(self) -> None:
        engines = (HostPhase.LOADED, HostPhase.ATTACHED)
        assert (self.life.phase in engines) == self.has_engine
        assert (self.life.phase is HostPhase.ATTACHED) == self.has_snapshot


TestHost = HostMachine.TestCase
TestHost.settings = settings(max_examples=50, stateful_step_count=30)
