"""Which devices get a model's engine, and which engines make place for another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpupoold.domain import Targets
from gpupoold.scheduling.events import Hostable, ModelCosts
from gpupoold.scheduling.hosting import (
    HOME_IDLE_S,
    LATE_IDLE_S,
    SHARED_S,
    HostedEngine,
    HostingDevice,
    HostingModel,
    HostingReason,
    choose,
    hostable_change,
    idle,
    shared,
    victims,
)
from gpupoold.scheduling.state import Model, State

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

    def in_use(self, name: str, served_s: float = SHARED_S, **options: object) -> HostedEngine:
        made = engine(name, is_busy=True, is_only=True, served_s=served_s, family="llama")
        return replace(made, **options)  # type: ignore[arg-type]

    def test_the_next_gets_the_engine_used_for_longest(self) -> None:
        full = device(0, self.in_use("a"), self.in_use("b", SHARED_S + 1), limit=20)
        waiting = model(family="llama", is_next=True)
        assert choose(waiting, [full]) == [(0, SHARED)]
        assert shared(full, "llama") == "b"

    def test_an_idle_engine_comes_first(self) -> None:
        full = device(0, self.in_use("a"), engine("b"), limit=20)
        assert choose(model(family="llama", is_next=True), [full]) == [(0, NEEDED)]
        assert victims(full, 10, NEEDED) == ["b"]

    @pytest.mark.parametrize(
        ("options", "waiting"),
        [
            ({"served_s": SHARED_S / 2}, {}),
            ({"family": "qwen"}, {}),
            ({"is_fixed": True}, {}),
            ({}, {"is_next": False}),
            ({"family": ""}, {"family": ""}),
        ],
    )
    def test_others_keep_theirs(
        self, options: dict[str, object], waiting: dict[str, object]
    ) -> None:
        """For some seconds, of another family, by hand, if others have waited longer."""
        full = device(0, self.in_use("a", **options), limit=10)  # type: ignore[arg-type]
        asked = model(**{"family": "llama", "is_next": True} | waiting)  # type: ignore[arg-type]
        assert choose(asked, [full]) == []
