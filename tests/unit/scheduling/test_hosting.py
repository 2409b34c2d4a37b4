"""Which devices get a model's engine, and which engines make place for another."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gpupoold.domain import Role, Targets
from gpupoold.scheduling import hosting
from gpupoold.scheduling.events import DeviceUp, Hostable, ModelCosts
from gpupoold.scheduling.hosting import (
    HOME_IDLE_S,
    LATE_IDLE_S,
    PROMPTS_IDLE_S,
    ROLE_IDLE_S,
    SHARED_S,
    STARVING_S,
    EngineWaits,
    HostedEngine,
    HostingDevice,
    HostingModel,
    HostingReason,
    choose,
    hostable_change,
    idle,
    served_s,
    shared,
    slack_of,
    slack_on,
)
from gpupoold.scheduling.state import DeviceState, Model, Request, State

FIXED, NEEDED = HostingReason.FIXED, HostingReason.NEEDED
LATE, SPARE, HOME = HostingReason.LATE, HostingReason.SPARE, HostingReason.HOME
SHARED = HostingReason.SHARED


def engine(name: str, num_bytes: int = 10, **options: object) -> HostedEngine:
    return HostedEngine(name, num_bytes, **options)  # type: ignore[arg-type]


def device(
    number: int, *engines: HostedEngine, limit: int | None = None, **options: object
) -> HostingDevice:
    held = {one.model: one for one in engines}
    return HostingDevice(number, held, limit, **options)  # type: ignore[arg-type]


def model(need: int = 10, **options: object) -> HostingModel:
    options.setdefault("need_bytes", dict.fromkeys(range(4), need))
    return HostingModel("new", **options)  # type: ignore[arg-type]


def victims(
    device: HostingDevice, need: int, reason: HostingReason, layout: str = ""
) -> list[str] | None:
    return hosting.victims(model(need, layouts={device.number: layout}), device, reason)


class TestPlenty:
    def test_every_device_hosts_every_model(self) -> None:
        chosen = choose(model(), [device(0), device(1), device(2)])
        assert chosen == [(0, NEEDED), (1, SPARE), (2, SPARE)]

    def test_a_device_that_has_it_is_not_chosen_again(self) -> None:
        assert choose(model(), [device(0, engine("new")), device(1)]) == [(1, SPARE)]

    def test_the_first_is_the_one_with_the_least_work(self) -> None:
        busy, loading, free = device(0, num_requests=3), device(1, num_loads=1), device(2)
        assert choose(model(), [busy, loading, free])[0] == (2, NEEDED)

    def test_a_draining_device_gets_none_while_there_are_others(self) -> None:
        draining = device(0, is_draining=True)
        assert choose(model(), [draining, device(1)]) == [(1, NEEDED)]
        assert choose(model(), [draining]) == [(0, NEEDED)]

    def test_a_drain_of_its_only_device_asks_for_another(self) -> None:
        hosts = device(0, engine("new"), is_draining=True)
        assert choose(model(), [hosts, device(1)]) == [(1, NEEDED)]
        assert choose(model(), [hosts]) == []

    def test_a_model_that_was_evicted_waits_for_a_request(self) -> None:
        assert choose(model(is_wanted=False), [device(0)]) == []


class TestByHand:
    def test_only_the_chosen_devices(self) -> None:
        devices = [device(0, engine("new")), device(1), device(2)]
        fixed = frozenset({1, 2})
        assert choose(model(fixed=fixed), devices) == [(1, FIXED), (2, FIXED)]
        assert choose(model(fixed=frozenset({0})), devices) == []

    def test_others_make_place(self) -> None:
        full = device(0, engine("old"), limit=10)
        assert choose(model(fixed=frozenset({0})), [full]) == [(0, FIXED)]
        kept = device(0, engine("old", is_fixed=True), limit=10)
        assert choose(model(fixed=frozenset({0})), [kept]) == []


class TestScarcity:
    def test_one_device_is_enough(self) -> None:
        full = device(0, engine("a"), engine("b"), limit=20)
        assert choose(model(), [full, device(1, limit=20)]) == [(1, NEEDED)]

    def test_an_engine_with_another_device_leaves_before_an_only_one(self) -> None:
        only = engine("only", is_only=True, idle_s=900)
        full = device(0, only, engine("double", idle_s=5), limit=20)
        assert victims(full, 10, NEEDED) == ["double"]
        assert victims(full, 15, NEEDED) == ["double", "only"]
        assert victims(full, 25, NEEDED) is None

    def test_the_one_unused_for_longest_leaves_first(self) -> None:
        used = [engine(f"{idle_s}", is_only=True, idle_s=idle_s) for idle_s in (30, 50, 40)]
        assert victims(device(0, *used, limit=30), 20, NEEDED) == ["50", "40"]

    def test_a_sibling_that_may_leave_leaves_first(self) -> None:
        """The wanted model takes over its engine, whatever its own would need."""
        sibling = engine("sibling", is_only=True, idle_s=1, layout="llama")
        full = device(0, engine("double", idle_s=900, layout="qwen"), sibling, limit=20)
        assert victims(full, 40, NEEDED, "llama") == ["sibling"]
        assert victims(full, 10, LATE, "llama") == victims(full, 10, NEEDED) == ["double"]
        assert victims(full, 40, NEEDED, "mistral") is None
        assert choose(model(40, layouts={0: "llama"}), [full]) == [(0, NEEDED)]
        assert choose(model(40, layouts={0: "mistral"}), [full]) == []

    def test_an_engine_of_another_family_is_as_any_other(self) -> None:
        """Equal layouts are not enough: the model would load an engine of its own."""
        other = engine("other", is_only=True, idle_s=1, layout="llama", family="rope 1e6")
        alike = engine("alike", is_only=True, idle_s=0, layout="llama", family="rope 5e5")
        full = device(0, other, alike, limit=20)
        asks = model(40, layouts={0: "llama"}, family="rope 5e5")
        assert hosting.victims(asks, full, NEEDED) == ["alike"]
        assert choose(asks, [device(0, other, limit=20)]) == []
        assert hosting.victims(replace(asks, family=""), full, NEEDED) == ["other"]

    def test_a_device_with_a_sibling_is_best(self) -> None:
        """A load takes longer than the sibling needs to get its engine back."""
        free = device(0, limit=20)
        full = device(1, engine("sibling", is_only=True, layout="llama"), limit=10, num_requests=9)
        asks = model(layouts={0: "llama", 1: "llama"})
        assert choose(asks, [free, full])[0] == (1, NEEDED)
        assert choose(model(), [free, full])[0] == (0, NEEDED)
        assert choose(asks, [free, replace(full, num_loads=1)])[0] == (0, NEEDED)

    @pytest.mark.parametrize("why", ["is_busy", "is_fixed"])
    def test_engines_that_stay(self, why: str) -> None:
        full = device(0, engine("a", **{why: True}), limit=10)
        assert victims(full, 10, NEEDED) is None
        assert choose(model(), [full]) == []

    def test_a_spare_engine_replaces_none(self) -> None:
        full = device(1, engine("a", idle_s=1e6), limit=10)
        assert choose(model(), [device(0, engine("new")), full]) == []
        assert victims(full, 10, SPARE) is None

    def test_the_first_engine_frees_less_than_it_was_charged_with(self) -> None:
        first = engine("first", 50, freed_bytes=10, idle_s=9)
        full = device(0, first, engine("b", idle_s=8), limit=60)
        assert victims(full, 10, NEEDED) == ["first"]
        assert victims(full, 20, NEEDED) == ["first", "b"]
        assert victims(full, 21, NEEDED) is None

    def test_libraries_count(self) -> None:
        assert victims(device(0, limit=20, kept_bytes=11), 10, NEEDED) is None

    def test_a_device_without_evictions_is_best(self) -> None:
        full = device(0, engine("a"), limit=10)
        busy = device(1, limit=10, num_requests=9)
        assert choose(model(), [full, busy])[0] == (1, NEEDED)

    def test_no_model_loses_its_last_device_where_another_has_two(self) -> None:
        first = device(0, engine("only", is_only=True), limit=10)
        second = device(1, engine("double"), limit=10, num_requests=9)
        assert choose(model(), [first, second])[0] == (1, NEEDED)


class TestLateRequests:
    def test_an_idle_device_helps(self) -> None:
        hosts = device(0, engine("new"), num_requests=9)
        full = device(1, engine("double", idle_s=LATE_IDLE_S), limit=10)
        assert choose(model(is_late=True), [hosts, full]) == [(1, LATE)]

    @pytest.mark.parametrize(
        "other",
        [
            device(1, engine("double", idle_s=LATE_IDLE_S - 1), limit=10),
            device(1, engine("only", idle_s=1e6, is_only=True), limit=10),
            device(1, engine("double", idle_s=1e6), limit=10, num_requests=1),
            device(1, engine("double", idle_s=1e6), limit=10, num_loads=1),
            device(1, engine("double", idle_s=1e6), limit=10, is_draining=True),
        ],
    )
    def test_others_are_not_disturbed(self, other: HostingDevice) -> None:
        hosts = device(0, engine("new"), num_requests=9)
        assert choose(model(is_late=True), [hosts, other]) == []


class TestRoles:
    decoding = device(
        1, engine("old", idle_s=ROLE_IDLE_S, is_only=True), limit=10, role=Role.DECODE
    )

    def test_answers_get_a_device(self) -> None:
        here = device(0, engine("new"), limit=10, role=Role.PREFILL)
        also = device(2, engine("busy", is_busy=True), limit=10, role=Role.DECODE)
        assert choose(model(), [here, also, self.decoding]) == [(1, HostingReason.ROLE)]
        assert victims(self.decoding, 10, HostingReason.ROLE) == ["old"]

    @pytest.mark.parametrize(("idle_s", "gets"), [(PROMPTS_IDLE_S, True), (ROLE_IDLE_S, False)])
    def test_prompts_do_where_an_engine_is_unused_for_long(self, idle_s: float, gets: bool) -> None:
        here = device(0, engine("new"), limit=10, role=Role.DECODE)
        other = device(1, engine("old", idle_s=idle_s, is_only=True), limit=10, role=Role.PREFILL)
        assert choose(model(), [here, other]) == [(1, HostingReason.PROMPTS)] * gets
        assert choose(model(is_late=True), [here, other]) == [(1, HostingReason.ROLE)]

    @pytest.mark.parametrize(
        "other",
        [
            replace(decoding, role=Role.PREFILL),
            replace(decoding, num_loads=1),
            device(1, engine("old", idle_s=ROLE_IDLE_S - 1), limit=10, role=Role.DECODE),
        ],
        ids=["of the same role", "loading", "in use lately"],
    )
    def test_others_are_not_disturbed(self, other: HostingDevice) -> None:
        here = device(0, engine("new"), limit=10, role=Role.PREFILL)
        assert choose(model(), [here, other]) == []

    def test_a_device_for_both_is_enough(self) -> None:
        assert choose(model(), [device(0, engine("new"), limit=10), self.decoding]) == []


class TestHomes:
    def test_the_planned_home_gets_the_engine(self) -> None:
        hosts = device(0, engine("new"))
        busy = device(1, engine("double"), limit=10, num_requests=9)
        assert choose(model(home=1), [hosts, busy]) == [(1, HOME)]
        assert choose(model(home=0), [hosts, busy]) == []

    @pytest.mark.parametrize("why", ["is_busy", "is_only", "is_fixed", "is_home"])
    def test_engines_that_stay(self, why: str) -> None:
        stays = engine("a", **{why: True}, idle_s=HOME_IDLE_S - 1)
        hosts, full = device(0, engine("new")), device(1, stays, limit=10)
        assert choose(model(home=1), [hosts, full]) == []

    def test_an_only_engine_that_nobody_uses_leaves(self) -> None:
        full = device(1, engine("a", is_only=True, idle_s=HOME_IDLE_S), limit=10)
        assert choose(model(home=1), [device(0, engine("new")), full]) == [(1, HOME)]

    def test_a_model_without_a_device_is_loaded_there_first(self) -> None:
        devices = [device(0), device(1, num_requests=9)]
        assert choose(model(home=1), devices)[0] == (1, NEEDED)

    def test_an_engine_at_home_leaves_after_others(self) -> None:
        full = device(0, engine("home", idle_s=9, is_home=True), engine("a", idle_s=1), limit=20)
        assert victims(full, 10, NEEDED) == ["a"]
        assert victims(full, 20, NEEDED) == ["a", "home"]

    def test_models_without_another_device_are_spread(self) -> None:
        devices = [device(0, engine("a", is_only=True)), device(1, engine("b"))]
        assert choose(model(), devices)[0] == (1, NEEDED)

    def test_devices_that_could_load(self) -> None:
        devices = [
            device(0, engine("new"), limit=10),
            device(1, engine("a", is_busy=True), limit=10),
            device(2, engine("b", is_only=True, idle_s=HOME_IDLE_S - 1), limit=10),
            device(3, engine("c", is_home=True), limit=10),
            device(4, limit=10),
            device(5, limit=10, is_draining=True),
            device(6, limit=5),
        ]
        devices = [idle(each) for each in devices]
        need_bytes = dict.fromkeys(range(7), 10)
        state = State({"new": Model("new", Targets(), 10, 1, ModelCosts())})
        found = hostable_change(state, model(need_bytes=need_bytes), devices)
        assert found == Hostable("new", (0, 1, 4))
        fixed = model(need_bytes=need_bytes, fixed=frozenset({2, 4}))
        assert hostable_change(state, fixed, devices) == Hostable("new", (0, 4))
        state.models["new"].hosts.add(0)
        state.models["new"].hostable = frozenset({4})
        assert hostable_change(state, fixed, devices) is None
        assert hostable_change(State(), fixed, devices) is None


class TestEnginesInUse:
    """Of fine-tunes, which take turns if all have requests."""

    def in_use(self, name: str, slack_s: float, served_s: float = 1.0) -> HostedEngine:
        options = {"is_busy": True, "is_only": True, "family": "llama"}
        return engine(name, 10, slack_s=slack_s, served_s=served_s, **options)

    def test_the_engine_that_is_needed_last_goes_to_urgent_requests(self) -> None:
        full = device(0, self.in_use("a", 8.0), self.in_use("b", 9.0), limit=20)
        waiting = model(family="llama", slack_s=3.0)
        assert choose(waiting, [full]) == [(0, SHARED)]
        assert shared(waiting, full) == "b"

    def test_late_requests_keep_an_engine_for_some_seconds(self) -> None:
        waiting = model(family="llama", slack_s=3.0)
        late = self.in_use("late", math.inf, SHARED_S)
        full = device(0, self.in_use("a", 9.0), late, limit=20)
        assert shared(waiting, full) == "late"
        new = self.in_use("late", math.inf, SHARED_S / 2)
        assert shared(waiting, device(0, self.in_use("a", 9.0), new, limit=20)) == "a"

    def test_who_starves_gets_the_engine_used_for_longest(self) -> None:
        used = [self.in_use(f"{s:g}", 0.0, s) for s in (SHARED_S, SHARED_S + 1)]
        starving = model(family="llama", is_starving=True)
        assert shared(starving, device(0, *used, limit=20)) == f"{SHARED_S + 1:g}"
        assert not shared(starving, device(0, self.in_use("a", 0.0), limit=10))

    def test_an_idle_engine_comes_first(self) -> None:
        full = device(0, self.in_use("a", 9.0), engine("b"), limit=20)
        assert choose(model(family="llama", slack_s=1.0), [full]) == [(0, NEEDED)]
        assert victims(full, 10, NEEDED) == ["b"]

    @pytest.mark.parametrize(
        ("options", "waiting"),
        [
            ({"slack_s": 3.5}, {}),
            ({"family": "qwen"}, {}),
            ({"is_fixed": True}, {}),
            ({}, {"slack_s": math.inf}),
            ({"family": ""}, {"family": ""}),
        ],
    )
    def test_others_keep_theirs(
        self, options: dict[str, object], waiting: dict[str, object]
    ) -> None:
        """Engines as urgent, of another family, by hand; and if all that wait is late."""
        stays = replace(self.in_use("a", 9.0), **options)  # type: ignore[arg-type]
        asked = model(**{"family": "llama", "slack_s": 3.0} | waiting)  # type: ignore[arg-type]
        assert choose(asked, [device(0, stays, limit=10)]) == []

    def test_slack_is_that_of_tokens_in_time(self) -> None:
        assert slack_of([4.0, 12.0, 15.0], 10.0) == 2.0
        assert slack_of([4.0], 10.0) == slack_of([], 10.0) == math.inf

    def test_requests_on_the_way_have_no_slack(self) -> None:
        known = Model("a", Targets(10.0), 10, 1, ModelCosts())
        at, waits = DeviceState(DeviceUp(0, 100, 1.0)), Request("r", known, 0.0, 10, None)
        assert slack_on(at, "a", 4.0) == 0.0
        at.enqueue(waits)
        assert slack_on(at, "a", 4.0) == 6.0
        at.moving["s"] = waits
        assert slack_on(at, "a", 4.0) == 0.0

    def test_the_first_of_those_that_wait_long_starves(self) -> None:
        waits, late_s = EngineWaits(), STARVING_S + 2
        for name, now_s in (("a", 0.0), ("b", 1.0)):
            assert not waits.is_starving(name, now_s, lambda other: True)
        assert not waits.is_starving("b", late_s, lambda other: True)
        assert waits.is_starving("b", late_s, lambda other: False)
        assert waits.is_starving("a", late_s, lambda other: True)
        waits.end("a")
        assert waits.is_starving("b", late_s, lambda other: True)

    def test_an_engine_serves_once_older_requests_have_a_token(self) -> None:
        assert served_s(10.0, [9.0, 12.0], 15.0) == 0.0
        assert served_s(10.0, [12.0], 15.0) == 5.0
        assert served_s(10.0, [9.0], 50.0) == 40.0
