"""Background requests: they run where nobody else wants the device, and leave at once."""

from __future__ import annotations

from gpupoold.domain import BACKGROUND_TTFT_S, Priority, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.admission import has_room
from gpupoold.scheduling.events import ModelCosts
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.wait_estimate import first_token_in_s
from tests.unit.scheduling.driver import GB, Driver, sends

BACKGROUND = Priority.BACKGROUND
COSTS = ModelCosts(0.1, 0.0, decode_base_s=0.02, decode_sequence_s=0.001)


def box(models: str = "a b", num_devices: int = 1, **options: object) -> Driver:
    """Devices that hold one model each, with exposed switches of a second."""
    known = {"capacity_bytes": 15 * GB, "targets": Targets(10.0, 0.1), "costs": COSTS}
    return Driver(GpupoolPolicy(), models, num_devices, **(known | options))  # type: ignore[arg-type]


def background(driver: Driver, model: str, name: str) -> None:
    driver.arrive(model, name, priority=BACKGROUND, ttft_s=BACKGROUND_TTFT_S)


def token(driver: Driver, model: str, *names: str, device: int = 0) -> None:
    driver.send(e.Stepped(device, model, names, 1))


def test_a_background_turn_ends_at_once_for_others() -> None:
    driver = box()
    background(driver, "a", "batch")
    token(driver, "a", "batch")
    device = driver.state.devices[0]
    assert device.turn is not None
    assert (device.turn.model, device.turn_rule) == ("a", Rule.BACKGROUND)
    driver.now_s = 1.0
    driver.arrive("b", "user")
    assert device.turn_began_s + device.turn.quota_s == 1.0
    assert device.then == "b"


def test_an_interactive_turn_does_not_end_for_background() -> None:
    driver = box()
    driver.arrive("b", "user")
    token(driver, "b", "user")
    turn = driver.state.devices[0].turn
    assert turn is not None
    driver.now_s = 0.5
    background(driver, "a", "batch")
    after = driver.state.devices[0].turn
    assert after is not None
    assert (after.model, after.quota_s) == (turn.model, turn.quota_s)


def test_background_waits_however_long() -> None:
    """Starving requests get a share of a device; background requests do not."""
    driver = box()
    background(driver, "a", "batch")
    driver.arrive("b", "user")
    device = driver.state.devices[0]
    for second in range(1, 200):
        driver.now_s = float(second)
        token(driver, "b", "user")
        assert device.turn is not None
        driver.send(e.TurnEnded(0, device.turn.turn_id))
        assert device.turn is not None
        assert device.turn.model == "b"
    driver.send(e.Ended("user"))
    driver.end_turn()
    assert device.turn is not None
    assert device.turn.model == "a"


def test_background_goes_to_the_device_without_others() -> None:
    driver = box(num_devices=3)
    driver.arrive("a", "first")
    token(driver, "a", "first")
    driver.arrive("b", "second")
    others = {driver.state.requests[name].device for name in ("first", "second")}
    background(driver, "a", "batch")
    request = driver.state.requests["batch"]
    assert request.rule is Rule.BATCHED
    assert request.device not in others


def test_background_is_no_load_and_no_demand() -> None:
    driver = box()
    for number in range(8):
        background(driver, "a", f"batch-{number}")
    token(driver, "a", *(f"batch-{number}" for number in range(8)))
    batch = driver.state.devices[0].working["a"]
    assert (batch.load(), batch.is_background) == (0.0, True)
    assert driver.state.arrivals.recent.models(driver.now_s) == []
    driver.arrive("a", "user")
    assert not batch.is_background
    assert 0 < batch.load() < batch.step_s() / 0.1


def test_background_joins_the_steps_of_its_model() -> None:
    driver = box()
    driver.arrive("a", "user")
    token(driver, "a", "user")
    assert sends(driver.arrive("a", "batch", priority=BACKGROUND)) == [("batch", 0)]


def test_room_ends_with_long_steps_waiting_prompts_and_memory() -> None:
    driver = box(kv_bytes_per_token=1000)
    model = driver.state.models["a"]
    assert has_room(driver.state, model, 100, 100)
    assert not has_room(driver.state, model, 100_000_000, 100)  # half of 5 GB
    driver.arrive("a", "user")
    assert not has_room(driver.state, model, 100, 100)  # the user's prompt waits
    token(driver, "a", "user")
    assert has_room(driver.state, model, 100, 100)
    for number in range(60):
        if not has_room(driver.state, model, 100, 100):
            break
        background(driver, "a", f"batch-{number}")
        token(driver, "a", f"batch-{number}")
    batch = driver.state.devices[0].working["a"]
    assert 20 < len(batch.requests) < 40
    assert batch.step_s() <= 0.5 * 0.1 < batch.step_s() + 2 * COSTS.decode_sequence_s


def test_waits_are_estimated_without_the_background_turn() -> None:
    driver = box()
    idle_s = first_token_in_s(driver.state, driver.state.models["b"], 100, 0.0)
    background(driver, "a", "batch")
    token(driver, "a", "batch")
    busy_s = first_token_in_s(driver.state, driver.state.models["b"], 100, 0.0)
    assert idle_s is not None
    assert busy_s is not None
    assert busy_s <= idle_s + 1.0  # a's KV and weights leave
