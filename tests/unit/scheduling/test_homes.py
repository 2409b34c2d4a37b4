"""Planned homes in the core: from arrivals to the devices of requests."""

from __future__ import annotations

from gpupoold.domain import Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.rules import Rule
from tests.unit.scheduling.driver import GB, Driver

PERIOD_S = 2.5


def driver(ttft_s: float, capacity_gb: int = 15) -> Driver:
    """Two devices, three models of 10 GB, one of them with ten times the target; copies take a
    second for 10 GB."""
    box = Driver(
        GpupoolPolicy(),
        num_devices=2,
        targets=Targets(ttft_s, 0.1),
        capacity_bytes=capacity_gb * GB,
    )
    box.send(e.TargetsChanged("b", Targets(10 * ttft_s, 0.1)))
    return box


def serve(box: Driver, *names: str) -> dict[str, list[int]]:
    """Let each model ask every few seconds for a minute; the devices of the requests."""
    found: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(24):
        for name in names:
            request_id = f"{name}{box.now_s}"
            box.arrive(name, request_id)
            device = box.state.requests[request_id].device
            assert device is not None
            found[name].append(device)
            box.send(e.Ended(request_id))
        for number in (0, 1):
            if box.running(number) is not None:
                box.end_turn(number)
        box.send(e.Tick(), at_s=box.now_s + PERIOD_S)
    return found


def test_models_in_a_hurry_get_homes_of_their_own() -> None:
    box = driver(ttft_s=1.0)
    found = serve(box, "a", "b")
    assert len(set(found["a"][4:])) == len(set(found["b"][4:])) == 1
    assert found["a"][-1] != found["b"][-1]
    box.arrive("a", "last")
    request = box.state.requests["last"]
    assert (request.device, request.rule) == (found["a"][-1], Rule.PLANNED_HOME)


def test_nobody_needs_a_home_where_models_fit_together() -> None:
    box = driver(ttft_s=1.0, capacity_gb=40)
    serve(box, "a", "b")
    box.arrive("a", "last")
    assert box.state.requests["last"].rule is not Rule.PLANNED_HOME


def test_nobody_needs_a_home_whose_targets_leave_time_for_switches() -> None:
    box = driver(ttft_s=60.0)
    serve(box, "a", "b")
    box.arrive("a", "last")
    assert box.state.requests["last"].rule is not Rule.PLANNED_HOME


def test_a_home_that_drains_or_goes_is_replaced() -> None:
    box = driver(ttft_s=1.0)
    found = serve(box, "a", "b")
    home, other = found["a"][-1], 1 - found["a"][-1]
    box.send(e.DrainSet(home, True))
    box.arrive("a", "during")
    assert box.state.requests["during"].device == other
    box.send(e.Ended("during"))
    box.send(e.DeviceDown(home))
    box.send(e.Tick(), at_s=box.now_s + 10.0)
    box.arrive("a", "after")
    assert box.state.requests["after"].device == other


def test_a_home_may_lack_the_engine() -> None:
    """Both models are on one device; one of them would be better off on the other."""
    box = driver(ttft_s=1.0)
    box.send(e.Unhosted(1, "a"), e.Unhosted(1, "b"), e.Hostable("a", (1,)), e.Hostable("b", (1,)))
    found = serve(box, "a", "b")
    assert {*found["a"], *found["b"]} == {0}
    homes = {name: box.state.models[name].home for name in "ab"}
    [moved] = [name for name, home in homes.items() if home and home.device == 1]
    box.send(e.Hosted(1, moved), e.Hostable(moved, ()))
    assert set(serve(box, moved)[moved]) == {1}


def test_a_load_waits_for_known_arrivals() -> None:
    box = driver(ttft_s=1.0)
    box.send(e.Unhosted(1, "a"), e.Unhosted(1, "b"), e.Hostable("a", (1,)), e.Hostable("b", (1,)))
    for name in "ab":
        box.arrive(name, name)
        box.send(e.Ended(name))
    box.send(e.Tick(), at_s=box.now_s + 10.0)
    assert all(one.home is None or one.home.device == 0 for one in box.state.models.values())
