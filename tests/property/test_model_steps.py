"""Each history of a model's steps ends with a served model.

The machine plays one model on three devices: it begins all steps that are due, ends the steps in
any order with any result, and kills workers, fills host memory and lets requests come meanwhile.
"""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpupoold.control.fleet.states import (
    HOST_TRANSITIONS,
    HostEvent,
    HostPhase,
    Life,
    ModelPhase,
)
from gpupoold.control.models.steps import (
    EnginesFull,
    FailureVerdict,
    HostingPlan,
    HostState,
    ModelStep,
    ModelView,
    StepKind,
    WeightsState,
    next_steps,
    verdict,
)
from gpupoold.control.weights.cache import CacheFull, Space
from gpupoold.control.workers.worker import WorkerEnded
from gpupoold.errors import Failed, GpupoolError, TimedOut
from gpupoold.scheduling.hosting import HostingChoice, HostingReason

LOAD_TIMEOUT_S = 600.0
ABSENT, LOADED, ATTACHED = HostPhase.ABSENT, HostPhase.LOADED, HostPhase.ATTACHED
NEEDED = HostingReason.NEEDED
K = StepKind
OPEN = ModelStep(K.OPEN)

DEGREES = {0: 1, 1: 1, 2: 2}
ERRORS = [
    Failed("no such layer"),
    WorkerEnded("killed"),
    EnginesFull("no memory for the engine"),
    CacheFull("no memory for the snapshot"),
    TimedOut("not loaded in time"),
]


class Played(RuleBasedStateMachine):
    """A model on devices 0 and 1, and on the group 2 of two GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.up = {0}
        self.lives = {one: self._life(one) for one in DEGREES}
        self.spaces = dict.fromkeys(DEGREES.values(), Space.FITS)
        self.waits: dict[str, float] = {}
        self.waits_since_s: float | None = None
        self.failed_until_s: float | None = None
        self.steps: set[ModelStep] = set()
        self.cached: set[int] = set()
        self.devices: list[int] = []
        self.resting: set[int] = set()
        self.claims: set[int] = set()
        self.is_removed = False
        self.options = self.earlier = 0
        self.options_of: dict[int, int] = {}  # of each engine
        self.options_by_step: dict[ModelStep, int] = {}
        self.is_open = self.is_evicted = self.is_damaged = self.is_wished = False
        self.num_requests = 0

    @staticmethod
    def _life(device: int) -> Life[HostPhase, HostEvent]:
        return Life(f"model on {device}", ABSENT, HOST_TRANSITIONS)

    def state(self) -> ModelView:
        is_failed = self.failed_until_s is not None
        is_ready = self.is_open and bool(self.devices or self.is_evicted)
        phases = ModelPhase.READY if is_ready else ModelPhase.LOADING
        loading = {one.number for one in self.steps if one.kind is K.LOAD}
        hosts = {
            one: HostState(
                life.phase,
                DEGREES[one],
                is_idle=one in self.up and one not in loading,
                is_resting=one in self.resting,
                is_outdated=self.options_of.get(one, self.options) != self.options,
            )
            for one, life in self.lives.items()
        }
        return ModelView(
            phase=ModelPhase.FAILED if is_failed else phases,
            hosts=hosts,
            weights={
                degree: WeightsState(degree in self.cached, space)
                for degree, space in self.spaces.items()
            },
            devices=tuple(self.devices),
            is_open=is_ready,
            is_evicted=self.is_evicted,
            is_damaged=self.is_damaged,
            is_failed=is_failed,
            is_trial=is_failed and self.now_s >= (self.failed_until_s or 0.0),
            is_wished=self.is_wished,
            is_removed=self.is_removed,
            num_waiting=0 if self.is_warm else self.num_requests,
            num_live=self.num_requests,
            under_way=frozenset(self.steps),
            retry_at_s=self.waits,
            waits_since_s=self.waits_since_s,
        )

    @property
    def is_warm(self) -> bool:
        awake = [one for one in self.devices if one not in self.resting]
        attached = all(self.lives[one].phase is ATTACHED for one in awake)
        cached = all(DEGREES[one] in self.cached for one in awake)
        has_any = bool(awake) or not self.devices
        return attached and cached and has_any and not (self.is_evicted or self.is_damaged)

    @property
    def is_settled(self) -> bool:
        """Whether a change of options has ended."""
        return all(self.options_of.get(one) == self.options for one in self.devices)

    def plan(self) -> HostingPlan:
        absent = [one for one in sorted(self.up) if self.lives[one].phase is ABSENT]
        is_wanted = not self.is_evicted or self.num_requests or self.is_wished
        loads = [HostingChoice(one, NEEDED) for one in absent if is_wanted]
        is_idle = not self.num_requests
        evict = self.claims.intersection(self.devices if is_idle else ())
        return HostingPlan(tuple(loads), evict=frozenset(evict), has_devices=bool(self.up))

    def decide(self) -> None:
        """Begin all due steps."""
        while True:
            state = self.state()
            found = next_steps(state, self.plan(), LOAD_TIMEOUT_S, self.now_s)
            if found.wait is None:
                self.waits_since_s = None
            elif self.waits_since_s is None:
                self.waits_since_s = self.now_s
            for step in found.steps:
                self.begin(step)
            if not found.steps:
                break
        if self.is_warm and self.devices:
            self.is_wished = False
        self.claims &= {one.number for one in self.steps if one.kind is K.EVICT}  # answered

    def begin(self, step: ModelStep) -> None:
        assert step not in self.steps
        beside = [one for one in self.steps if OPEN not in (one, step)]
        assert not (beside and step.is_alone), (step, beside)
        assert not any(one.is_alone for one in beside), (step, beside)
        assert step.kind is K.REMOVE or not self.is_removed
        if step.kind is K.LOAD:
            assert step.number in self.up
            assert all(one.number != step.number for one in beside)
            self.lives[step.number].move(HostEvent.LOAD)
        if step.kind is K.REST:
            self.rest(step.number)
        elif step.kind is K.FAIL:
            self.failed(step, TimedOut("in vain"))
        else:
            self.steps.add(step)
            self.options_by_step[step] = self.options

    def rest(self, degree: int) -> None:
        numbers = {one for one in self.devices if DEGREES[one] == degree}
        assert set(self.devices) - self.resting - numbers, "no device serves"
        self.resting |= numbers

    def failed(self, step: ModelStep, error: GpupoolError) -> None:
        state = self.state()
        self.steps.discard(step)
        if not isinstance(error, WorkerEnded):
            self.waits[step.key] = self.now_s + 10.0
        says = verdict(state, step, error)
        is_user = self.is_wished or step.kind in (K.REMOVE, K.REPLACE)
        assert says is not FailureVerdict.RAISED or is_user
        if step.kind is K.REPLACE:
            self.options = self.earlier
            return
        if says not in (FailureVerdict.LATER, FailureVerdict.NOTED):
            self.num_requests, self.is_wished = 0, False
        if says in (
            FailureVerdict.NOT_LOADED,
            FailureVerdict.FAILED_AGAIN,
            FailureVerdict.POSTPONED,
        ) or (says is FailureVerdict.NOT_WARMED and not self.devices):
            self.failed_until_s, self.is_evicted = self.now_s + 30.0, False

    def leave(self, number: int) -> None:
        """The engine leaves a device, also if the worker does not answer."""
        if self.lives[number].phase in (LOADED, ATTACHED):
            self.lives[number].move(HostEvent.UNLOAD)
            self.lives[number].move(HostEvent.UNLOADED)
        if number in self.devices:
            self.devices.remove(number)
            self.is_evicted = self.is_open and not self.devices
        self.resting.discard(number)
        self.options_of.pop(number, None)

    def forget(self) -> None:
        """The model is removed, and added anew."""
        for number in DEGREES:
            self.leave(number)
        self.cached, self.num_requests, self.failed_until_s = set(), 0, None
        self.is_open = self.is_evicted = self.is_damaged = self.is_wished = False
        self.is_removed, self.waits_since_s = False, None
        self.waits.clear()

    def attach(self, number: int) -> None:
        life = self.lives[number]
        if life.phase is LOADED:
            life.move(HostEvent.ATTACH)
        self.resting.discard(number)

    def ended(self, step: ModelStep) -> None:
        """Apply the success of a step."""
        self.steps.discard(step)
        self.waits.pop(step.key, None)
        match step.kind:
            case K.LOAD:
                life = self.lives[step.number]
                life.move(HostEvent.LOADED)
                self.cached.add(DEGREES[step.number])
                self.attach(step.number)
                self.devices.append(step.number)
                self.options_of[step.number] = self.options_by_step[step]
                self.is_evicted = False
            case K.OPEN:
                self.is_open, self.failed_until_s = bool(self.devices), None
            case K.BRING:
                self.cached.add(step.number)
                for one in self.devices:
                    if DEGREES[one] == step.number:
                        self.attach(one)
            case K.EVICT | K.LEAVE:
                self.leave(step.number)
            case K.REPLACE:
                self.cached.add(DEGREES[step.number])
                self.attach(step.number)
                self.options_of[step.number] = self.options_by_step[step]
            case K.REMOVE:
                self.forget()
            case K.RENEW:
                self.is_damaged = False
                for one in self.devices:
                    if one not in self.resting:
                        self.options_of[one] = self.options_by_step[step]
                        self.cached.add(DEGREES[one])
                        self.attach(one)

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), error=st.none() | st.sampled_from(ERRORS))
    def end_step(self, data: st.DataObject, error: GpupoolError | None) -> None:
        step = data.draw(st.sampled_from(sorted(self.steps, key=lambda one: one.key)))
        if error is None:
            self.ended(step)
        else:
            if step.kind is K.LOAD:
                self.lives[step.number].move(HostEvent.FAIL)
            self.failed(step, error)
            if step.kind is K.EVICT:
                self.leave(step.number)
            elif step.kind is K.REMOVE:
                self.forget()
        self.decide()

    @rule(number=st.sampled_from(sorted(DEGREES)))
    def worker_up(self, number: int) -> None:
        self.up.add(number)
        self.decide()

    @rule(number=st.sampled_from(sorted(DEGREES)))
    def worker_down(self, number: int) -> None:
        self.up.discard(number)
        self.lives[number].move(HostEvent.LOSE_WORKER)
        if number in self.devices:
            self.devices.remove(number)
        self.resting.discard(number)
        self.options_of.pop(number, None)
        for step in [
            one for one in self.steps if one.key in (f"load {number}", f"replace {number}")
        ]:
            self.failed(step, WorkerEnded("killed"))
        self.decide()

    @rule(degree=st.sampled_from([1, 2]), space=st.sampled_from(Space))
    def memory(self, degree: int, space: Space) -> None:
        self.spaces[degree] = space
        self.decide()

    @rule(degree=st.sampled_from([1, 2]))
    def drop(self, degree: int) -> None:
        """Another model takes the memory of an idle snapshot."""
        if not self.steps and not self.num_requests:
            self.cached.discard(degree)
            for one in self.devices:
                if DEGREES[one] == degree and self.lives[one].phase is ATTACHED:
                    self.lives[one].move(HostEvent.DETACH)
        self.decide()

    @precondition(lambda self: self.options == self.earlier or self.is_settled)
    @rule(options=st.integers(0, 3))
    def change(self, options: int) -> None:
        """A user changes the options; the earlier hold after a failure."""
        self.earlier, self.options = self.options, options
        self.decide()

    @rule(numbers=st.sets(st.sampled_from(sorted(DEGREES)), min_size=1))
    def claim(self, numbers: set[int]) -> None:
        """Loads of other models claim the places of engines."""
        self.claims |= numbers
        self.decide()

    @rule()
    def remove(self) -> None:
        """A user removes the model: steps are cancelled, and requests end."""
        self.is_removed, self.num_requests, self.is_wished = True, 0, False
        for step in [one for one in self.steps if one.kind not in (K.EVICT, K.REMOVE)]:
            if step.kind is K.LOAD:
                self.lives[step.number].move(HostEvent.FAIL)
            self.steps.discard(step)
        self.decide()

    @rule()
    def ask(self) -> None:
        self.num_requests += self.failed_until_s is None and not self.is_removed
        self.decide()

    @rule()
    def wish(self) -> None:
        self.is_wished, self.failed_until_s = not self.is_removed, None
        self.waits.clear()
        self.decide()

    @precondition(lambda self: self.devices)
    @rule()
    def damage(self) -> None:
        self.is_damaged, self.num_requests = True, 0
        self.decide()

    @rule(seconds=st.sampled_from([1.0, 30.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.decide()

    @invariant()
    def a_model_that_is_asked_for_makes_progress(self) -> None:
        """There is a step, a wait with an end or a cause, or the model is served."""
        if self.num_requests and not self.is_warm:
            assert self.steps or self.waits_since_s is not None or self.waits

    def teardown(self) -> None:
        """In peace all devices serve at last."""
        self.up, self.claims = set(DEGREES), set()
        self.spaces = dict.fromkeys(DEGREES.values(), Space.FITS)
        self.num_requests = max(1, self.num_requests)
        for _ in range(50):
            self.now_s += 1000.0
            self.decide()
            for step in list(self.steps):
                self.ended(step)
                self.decide()
        assert not self.steps
        assert sorted(self.devices) == sorted(DEGREES)
        assert self.is_open
        assert self.is_warm
        assert not self.resting
        assert self.failed_until_s is None
        assert self.waits_since_s is None
        assert not self.is_removed
        assert self.is_settled


Played.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPlayed = Played.TestCase
