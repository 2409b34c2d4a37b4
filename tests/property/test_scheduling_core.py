"""The scheduling core under every policy, with devices that come and go and late messages."""

from __future__ import annotations

import math

import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from gpupoold.domain import Priority, Role, Targets
from gpupoold.replay.log_file import replay_on
from gpupoold.scheduling import events as e
from gpupoold.scheduling.wait_estimate import drain_of, first_token_in_s, next_token_in_s
from gpupoold.sim.policies import POLICY_NAMES
from tests.property.core_box import GB, Box, BoxDevice, Sizes

WHICH = st.integers(0, 9)
TARGETS = st.builds(Targets, st.floats(0.1, 20), st.floats(0.01, 0.5))
STEPS_S = st.floats(0, 0.2)


class CoreMachine(RuleBasedStateMachine):
    """Events in any order; ``Box`` checks the answers."""

    policy = ""
    sizes = st.just(Sizes())

    @initialize(data=st.data(), num_devices=st.integers(1, 4), num_prefill=st.integers(1, 2))
    def begin(self, data: st.DataObject, num_devices: int, num_prefill: int) -> None:
        self.box = Box(self.policy, num_devices, num_prefill, data.draw(self.sizes))
        for number in range(num_devices):
            self.box.up(number)
        for model in ("m0", "m1", "m2"):
            self.add_model(int(model[1:]), Targets(5.0, 0.1))

    @rule(which=WHICH, promised=TARGETS)
    def add_model(self, which: int, promised: Targets) -> None:
        """A new model on all devices, or an old one described anew."""
        model = f"m{which % 5}"
        self.box.add_model(model, promised)
        for device in self.box.devices:
            self.box.host(device.number, model)

    @rule(which=WHICH)
    def remove_model(self, which: int) -> None:
        self.box.remove_model(f"m{which % 5}")

    @rule(which=WHICH, promised=TARGETS)
    def change_targets(self, which: int, promised: Targets) -> None:
        if self.box.models:
            self.box.tell(e.TargetsChanged(self.model(which), promised))

    @rule(
        which=WHICH,
        count=st.integers(1, 10),
        prompt_tokens=st.integers(1, 5000),
        num_tokens=st.integers(1, 60),
        ago_s=st.floats(0, 100),
        priority=st.sampled_from(Priority),
    )
    def arrive(
        self,
        which: int,
        count: int,
        prompt_tokens: int,
        num_tokens: int,
        ago_s: float,
        priority: Priority,
    ) -> None:
        for _ in range(count if self.box.models else 0):
            self.box.arrive(self.model(which), prompt_tokens, num_tokens, ago_s, priority)

    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        lives = sorted(self.box.lives)
        request_id = lives[which % len(lives)] if lives else "unknown"
        self.box.cancel(request_id)
        self.box.cancel(request_id)

    @rule(which=WHICH, num_steps=st.integers(1, 20), step_s=STEPS_S)
    def step_unheard(self, which: int, num_steps: int, step_s: float) -> None:
        self.box.step(self.device(which), num_steps, step_s)

    @rule(which=WHICH)
    def end_turn_unheard(self, which: int) -> None:
        if self.device(which).then is not None:
            self.box.end_turn(self.device(which))

    @rule(which=WHICH, num_events=st.integers(1, 4))
    def hear(self, which: int, num_events: int) -> None:
        self.box.hear(self.device(which), num_events)

    @rule(which=WHICH, prompt_tokens=st.integers(1, 5000))
    def ask_how_long(self, which: int, prompt_tokens: int) -> None:
        """Estimates are times, whatever the state is."""
        if not self.box.models:
            return
        state, now_s = self.box.recorded.state, self.box.now_s
        model = state.models[self.model(which)]
        wait_s = first_token_in_s(state, model, prompt_tokens, now_s)
        assert (wait_s is None) == (not model.hosts)
        assert wait_s is None or 0 <= wait_s < math.inf
        for request in state.requests.values():
            next_s = next_token_in_s(state, request, now_s)
            assert next_s is None or 0 <= next_s < math.inf
        for one in (model, None):
            drain = drain_of(state, one, now_s, lambda _: prompt_tokens)
            waits_s = [drain.seconds_until(num) or 0.0 for num in (1, 2, 50)]
            assert all(0 <= each_s < math.inf for each_s in waits_s)
            assert waits_s == sorted(waits_s)

    @rule(num_turns=st.integers(1, 5), num_steps=st.integers(1, 20), step_s=STEPS_S)
    def run(self, num_turns: int, num_steps: int, step_s: float) -> None:
        """All devices work, and are heard at once."""
        for _ in range(num_turns):
            for device in self.box.devices:
                self.box.step(device, num_steps, step_s)
                if device.then is not None:
                    self.box.end_turn(device)
                self.box.hear(device, len(device.said))

    @rule(which=WHICH)
    def device_down(self, which: int) -> None:
        self.box.down(self.device(which).number)

    @rule(which=WHICH)
    def device_up(self, which: int) -> None:
        """New, or anew without a word about its end."""
        number = self.device(which).number
        self.box.up(number)
        for model in sorted(self.box.models):
            self.box.host(number, model)

    @rule(which=WHICH, of=WHICH)
    def host(self, which: int, of: int) -> None:
        if self.box.models:
            self.box.host(self.device(which).number, self.model(of))

    @rule(which=WHICH, of=WHICH)
    def unhost(self, which: int, of: int) -> None:
        self.box.unhost(self.device(which).number, f"m{of % 5}")

    @rule(which=WHICH, of=WHICH, num_gb=st.integers(0, 20))
    def memory(self, which: int, of: int, num_gb: int) -> None:
        missing = ((f"m{of % 5}", num_gb * GB), ("gone", 1))
        self.box.tell(e.MemoryChanged(self.device(which).number, missing))

    @rule(after_s=st.floats(0, 100))
    def tick(self, after_s: float) -> None:
        self.box.now_s += after_s
        self.box.tell(e.Tick())

    @rule(which=WHICH, role=st.sampled_from(Role), is_fixed=st.booleans())
    def set_role(self, which: int, role: Role, is_fixed: bool) -> None:
        self.box.set_role(self.device(which).number, role, is_fixed=is_fixed)

    @rule(which=WHICH, is_draining=st.booleans())
    def drain(self, which: int, is_draining: bool) -> None:
        self.box.tell(e.DrainSet(self.device(which).number, is_draining))

    @rule(which=WHICH, turn_id=st.integers(-1, 3))
    def old_news(self, which: int, turn_id: int) -> None:
        """Of turns that have ended, and of requests and devices that are gone."""
        device = self.device(which)
        if device.turn is None or device.turn.turn_id != turn_id:
            self.box.tell(e.TurnEnded(device.number, turn_id))
        self.box.tell(e.TurnEnded(99, 1), e.Attached("gone"), e.DeviceDown(99))
        self.box.tell(e.Stepped(device.number, "m0", ("gone",), 1, 0.02), e.Unhosted(99, "m0"))
        self.box.tell(e.ModelRemoved("gone"), e.MemoryChanged(99, (("m0", 1),)))

    def teardown(self) -> None:
        """All that is live is served; and told the same, another core does the same."""
        if hasattr(self, "box"):
            self.box.finish()
            for segment in self.box.recorded.segments:
                assert replay_on(segment.core(), segment.entries) is None

    def model(self, which: int) -> str:
        return sorted(self.box.models)[which % len(self.box.models)]

    def device(self, which: int) -> BoxDevice:
        return self.box.devices[which % len(self.box.devices)]


# Room for one to some thirty prompts; all five models at once have to fit for "static".
LITTLE_KV = st.builds(
    Sizes,
    st.just(GB),
    st.just(1_000_000),
    st.integers(2, 15).map(lambda num_gb: num_gb * GB),
    st.integers(0, 5).map(lambda num_gb: num_gb * GB),
)
FAST_POLICIES = ("gpupool", "aegaeon", "static")
STATIC_KV = st.just(Sizes(GB, 1_000_000, 87 * GB, 0))


@pytest.mark.parametrize("has_little_kv", [False, True], ids=["", "little-kv"])
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(name, marks=() if name in FAST_POLICIES else pytest.mark.slow)
        for name in POLICY_NAMES
    ],
)
def test_core(policy: str, has_little_kv: bool) -> None:
    """Every request is served to its end, however little room there is for KV."""
    sizes = STATIC_KV if policy == "static" else LITTLE_KV
    members = {"policy": policy} | ({"sizes": sizes} if has_little_kv else {})
    machine = type(f"CoreMachine_{policy}", (CoreMachine,), members)
    limits = settings(
        max_examples=25 if has_little_kv else 40,
        stateful_step_count=40,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(machine, settings=limits)


def test_a_request_waits_for_room_that_another_on_its_way_has() -> None:
    """Found by the machine: the second device has nothing to run until the KV of r1 has come."""
    box = Box("aegaeon", 2, sizes=Sizes(GB, 1_000_000, 2 * GB, 0))
    box.up(0)
    box.up(1)
    box.add_model("m0", Targets(1.0, 0.5))
    box.host(0, "m0")
    box.host(1, "m0")
    box.arrive("m0", 500, 2, 0.0)
    box.arrive("m0", 500, 2, 0.0)
    box.step(box.devices[0], 1, 0.0)
    box.hear(box.devices[0], 1)
    target = box.state.devices[1]
    assert list(target.moving) == ["r1"]
    box.down(0)
    assert list(target.waiting_for_kv["m0"].requests) == ["r2"]
    assert target.turn is None
    box.finish()


def test_an_end_unheard_of_a_request_whose_target_goes_down() -> None:
    """Found by the machine: the source has finished the request that it is to release."""
    box = Box("request-level-4", 2)
    box.up(0)
    box.up(1)
    box.add_model("m0", Targets(1.0, 0.5))
    box.host(0, "m0")
    box.host(1, "m0")
    for _ in range(5):  # one more than a device may have
        box.arrive("m0", 1, 2, 0.0)
    box.cancel("r1")
    source = box.devices[1]
    box.step(source, 1, 0.0)
    box.hear_all()
    box.step(source, 1, 0.0)
    box.set_role(1, Role.PREFILL, is_fixed=False)
    assert list(box.state.devices[0].moving) == ["r5"]
    box.down(0)
    box.finish()


def test_requests_do_not_take_memory_from_each_other_without_end() -> None:
    """Found by the machine: which requests are late depends on the models that have memory."""
    box = Box("gpupool", 1, sizes=Sizes(GB, 1_000_000, 11 * GB, 0))
    box.up(0)
    for model in ("m0", "m1", "m2"):
        box.add_model(model, Targets(5.0, 0.1))
        box.host(0, model)
    box.arrive("m1", 5000, 1, 0.0, Priority.NORMAL)
    box.arrive("m0", 500, 1, 4.9, Priority.HIGH)
    box.arrive("m0", 500, 1, 4.9, Priority.HIGH)
    box.arrive("m2", 1000, 1, 4.0, Priority.HIGH)
    box.arrive("m1", 2000, 1, 4.0, Priority.LOW)
    box.finish()


def test_requests_on_their_way_keep_the_memory_of_their_model() -> None:
    """A request of the same model waits meanwhile, although the host cache has room."""
    box = Box("aegaeon", 2, 1, Sizes(GB, 1_000_000, 2 * GB, GB))
    for number in range(2):
        box.up(number)
    box.add_model("m0", Targets(5.0, 0.1))
    for number in range(2):
        box.host(number, "m0")
    for _ in range(4):
        box.arrive("m0", 1, 2, 0.0, Priority.HIGH)
    source, target = (box.devices[n] for n in ((0, 1) if box.devices[0].has else (1, 0)))
    for _ in range(3):
        box.step(source, 1, 0.0)
        box.hear(source, len(source.said))
    box.tell(e.DrainSet(source.number, True))
    state = box.state.devices[target.number]
    assert len(state.moving) == 3
    assert len(state.waiting_for_kv["m0"].requests) == 1
    assert state.turn is None
    box.finish()
