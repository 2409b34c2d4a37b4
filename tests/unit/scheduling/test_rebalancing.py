"""Answers move off full decode devices when that is worth the copy, and not to and fro."""

from __future__ import annotations

from gpupoold.domain import Role, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import ModelCosts
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.state import PlannedHome
from tests.unit.scheduling.driver import GB, Driver, migrations_in

# A step takes 20 ms and 1 ms per answer: a load of 1 with 80 answers. KV of 1 GB per 10,000.
COSTS = ModelCosts(
    prefill_base_s=0.0, prefill_token_s=1e-5, decode_base_s=0.02, decode_sequence_s=0.001
)


def box(*answers: int, role: Role = Role.DECODE) -> Driver:
    """A prefill device, and others that have so many answers of 10 tokens each."""
    num_devices = len(answers) + 1
    driver = Driver(GpupoolPolicy(), "a", 0, costs=COSTS, targets=Targets(10.0, 0.1))
    for number, count in enumerate(answers, 1):
        driver.send(e.DeviceUp(number, 80 * GB, 10 * GB), e.Hosted(number, "a"))
        names = [f"r{number}-{k}" for k in range(count)]
        for name in names:
            driver.arrive("a", name)
        driver.send(e.RoleSet(number, Role.DECODE))  # so that they stay
        for name in names:
            driver.step(number, name, num_tokens=10)
    driver.send(e.DeviceUp(0, 80 * GB, 10 * GB), e.Hosted(0, "a"), e.RoleSet(0, Role.PREFILL))
    driver.send(*(e.RoleSet(number, role) for number in range(1, num_devices)))
    driver.send(*(e.MemoryChanged(number, (("a", 0),)) for number in range(num_devices)))
    devices = driver.state.devices
    placed = [len(devices[number].batches["a"].requests) for number in range(1, num_devices)]
    assert placed == list(answers)
    return driver


def attach_all(driver: Driver) -> None:
    moving = [one.id for device in driver.state.devices.values() for one in device.moving.values()]
    driver.send(*(e.Attached(request_id) for request_id in moving))


def test_a_full_device_gives_to_one_with_room_until_it_is_full_no_more() -> None:
    driver = box(90, 20)
    num_migrated = 0
    for _ in range(20):
        driver.now_s += 1.0
        migrations = migrations_in(driver.send(e.Tick()))
        assert len(migrations) <= 8
        assert all((source, target) == (1, 2) for _, source, target in migrations)
        num_migrated += len(migrations)
        attach_all(driver)
    # 80 answers take 100 ms, and their KV a little of the device's load.
    assert 10 <= num_migrated <= 15


def test_nothing_moves_where_nobody_has_room_or_nobody_is_full() -> None:
    for answers in ((90, 70), (70, 20), (79,)):
        assert migrations_in(box(*answers).send(e.Tick())) == []


def shared_box() -> Driver:
    """Devices that do both stages; the first has answers of another model too."""
    driver = box(90, 20, 10, role=Role.MIXED)
    added = e.ModelAdded("b", Targets(10.0, 0.1), GB, 1000, COSTS)
    driver.send(added, e.Hosted(1, "b"))
    driver.arrive("b", "other")
    driver.end_turn(1)
    assert driver.running(1) == "b"
    return driver


def test_devices_that_do_both_keep_the_answers_of_a_lone_model() -> None:
    assert migrations_in(box(90, 20, role=Role.MIXED).send(e.Tick())) == []


def test_devices_that_do_both_give_answers_where_models_take_turns() -> None:
    driver = shared_box()
    migrations = list(driver.core.policy.rebalance(driver.state, 0.0))
    assert {target.number for _, target in migrations} == {3}


def test_a_model_with_a_planned_home_stays_on_the_home_and_its_helpers() -> None:
    driver = shared_box()
    driver.state.models["a"].home = PlannedHome(1, frozenset({2}))
    migrations = list(driver.core.policy.rebalance(driver.state, 0.0))
    assert {target.number for _, target in migrations} == {2}
    driver.state.models["a"].home = PlannedHome(1)  # of the engine only
    migrations = list(driver.core.policy.rebalance(driver.state, 0.0))
    assert {target.number for _, target in migrations} == {3}


def test_no_answer_moves_for_the_last_of_its_tokens() -> None:
    """256 tokens are expected: 24.6 s to go at the target. A copy of 1 GB out and in takes
    0.2 s, one of 20 GB four."""
    driver = box(90, 20)
    for one in driver.state.requests.values():
        one.prompt_tokens = 200_000  # 20 GB; not told, as no device could have them all
    policy = driver.core.policy
    assert list(policy.rebalance(driver.state, 0.0)) == []


def test_an_answer_is_not_made_late_for_it() -> None:
    driver = box(90, 20)
    due_s = Targets(10.0, 0.1).deadline_s(0.0, 10)
    assert migrations_in(driver.send(e.Tick(), at_s=due_s - 0.001)) == []  # a copy takes 2 ms
    assert migrations_in(driver.send(e.Tick(), at_s=due_s + 0.001)) != []  # late anyway


def test_whoever_has_moved_stays_a_while() -> None:
    driver = box(90, 20)
    migrations = migrations_in(driver.send(e.Tick()))
    moved = {request_id for request_id, _, _ in migrations}
    assert moved
    attach_all(driver)
    for number in range(70):  # now the other device is full, and the first is not
        driver.arrive("a", f"n{number}", prompt_tokens=10)
        driver.step(0, f"n{number}")
        attach_all(driver)
    for request_id in [f"r1-{k}" for k in range(90) if f"r1-{k}" not in moved]:
        driver.send(e.Ended(request_id))
    counts = [len(driver.state.devices[n].batches["a"].requests) for n in (1, 2)]
    assert counts[1] > 80 > counts[0]
    migrations = migrations_in(driver.send(e.Tick(), at_s=5.0))
    assert {source for _, source, _ in migrations} == {2}
    assert not moved & {request_id for request_id, _, _ in migrations}


assert GB == 10**9  # what the figures above take for granted
