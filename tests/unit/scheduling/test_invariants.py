"""The check finds every way to contradict the state, and names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import Turn
from gpupoold.scheduling.invariants import InvariantBroken, check_state
from gpupoold.scheduling.state import Batch, RequestPhase, State
from tests.unit.scheduling.driver import Driver
from tests.unit.scheduling.test_core import Prefills


def busy_state() -> State:
    """Requests everywhere: held, queued, sent, decoding, moving."""
    driver = Driver(Prefills(), num_devices=2)
    driver.arrive("a", "decoding")
    driver.send(e.Stepped(0, "a", ("decoding",)), e.Attached("decoding"))
    driver.send(e.Attached("decoding"))
    driver.arrive("a", "moving")
    driver.step(0, "moving")
    driver.arrive("a", "sent")
    driver.arrive("b", "other")
    driver.send(e.Unhosted(0, "c"), e.Unhosted(1, "c"))
    driver.arrive("c", "held")
    driver.arrive("a", "queued")
    state = driver.state
    queued, device = state.requests["queued"], state.devices[0]
    device.leave(queued)
    queued.phase = RequestPhase.QUEUED
    device.enqueue(queued)
    check_state(state)
    assert [one.phase.name for one in state.requests.values()] == [
        "DECODING", "MOVING", "SENT", "SENT", "HELD", "QUEUED",
    ]  # fmt: skip
    return state


def test_a_new_state_is_sound() -> None:
    check_state(State())
    busy_state()


def change_without_a_new_revision(state: State) -> None:
    assert state.devices[0].batches["a"].load() > 0
    state.models["a"].speed().step_ratio = 2.0


BREAKS: dict[str, Callable[[State], object]] = {
    "5 are held or on a device": lambda s: s.held.clear(),
    "queued of a in phase QUEUED is on device 1, but says device 0": lambda s: s.devices[1].enqueue(
        s.requests["queued"]
    ),
    "sent of a in phase DECODING has 0 tokens after 100": lambda s: setattr(
        s.requests["sent"], "phase", RequestPhase.DECODING
    ),
    "held of c in phase SENT is among the held": lambda s: setattr(
        s.requests["held"], "phase", RequestPhase.SENT
    ),
    "queued of a in phase SENT is on device 0 where only": lambda s: setattr(
        s.requests["queued"], "phase", RequestPhase.SENT
    ),
    "sent of a in phase SENT is on device 0, but says device 1": lambda s: setattr(
        s.requests["sent"], "device", 1
    ),
    "moving of a .* has 0 tokens": lambda s: setattr(s.requests["moving"], "num_tokens", 0),
    "sent of a .* has 0 tokens after -1": lambda s: setattr(
        s.requests["sent"], "prompt_tokens", -1
    ),
    "sent of a .* has -2 tokens": lambda s: setattr(s.requests["sent"], "num_tokens", -2),
    "not live under that id": lambda s: s.requests.pop("sent"),
    "a on device 0 says num_waiting is 3, but it is 1": lambda s: setattr(
        s.devices[0].batches["a"], "num_waiting", 3
    ),
    "a on device 1 says context_tokens is 7, but it is 101": lambda s: setattr(
        s.devices[1].batches["a"], "context_tokens", 7
    ),
    "a on device 1 says prompt_tokens is 1, but it is 100": lambda s: setattr(
        s.devices[1].batches["a"], "prompt_tokens", 1
    ),
    "a on device 1 says waiting_tokens2 is 3, but it is 0": lambda s: setattr(
        s.devices[1].batches["a"], "waiting_tokens2", 3
    ),
    "a on device 0 says its load is .*, but it is": change_without_a_new_revision,
    "device 0 has a queue of b without requests": lambda s: s.devices[0].queued.update(
        b=Batch(s.models["b"])
    ),
    "other of b in phase SENT is in the batch of a": lambda s: (
        s.devices[0].batches["a"].requests.update(other=s.requests["other"])
    ),
    "of a model that is not known": lambda s: s.models.pop("c"),
    "model a is known as z": lambda s: s.models.update(z=s.models["a"]),
    "model a is hosted by device 9, which is not up": lambda s: s.models["a"].hosts.add(9),
    "hosted by device 0, which has no batch": lambda s: s.models["c"].hosts.add(0),
    "batch of c on device 0, which does not host it": lambda s: s.devices[0].batches.update(
        c=Batch(s.models["c"])
    ),
    "batch of c on device 0 is of b": lambda s: s.devices[0].batches.update(c=Batch(s.models["b"])),
    "has requests, but is not among those worked on": lambda s: s.devices[0].working.clear(),
    "device 1 works on b, of which it has no requests": lambda s: s.devices[1].working.update(
        b=s.devices[1].batches["b"]
    ),
    "device 1 is known as 4": lambda s: s.devices.update({4: s.devices[1]}),
    "a turn of c, which it does not host": lambda s: setattr(
        s.devices[0], "turn", Turn(1, "c", 1.0)
    ),
    "a turn of a for -1.0 s": lambda s: setattr(s.devices[0], "turn", Turn(1, "a", -1.0)),
    "a turn of a for nan s": lambda s: setattr(s.devices[0], "turn", Turn(1, "a", float("nan"))),
    "turn 99 of": lambda s: setattr(s.devices[0], "turn", Turn(99, "a", 1.0)),
    "devices 0 and 1 both have turn": lambda s: setattr(s.devices[0], "turn", s.devices[1].turn),
    "a turn of a and a again": lambda s: setattr(s.devices[0], "then", "a"),
    "device 0 runs c next, which it does not host": lambda s: setattr(s.devices[0], "then", "c"),
    "device 1 runs b next, which has no requests": lambda s: setattr(s.devices[1], "then", "b"),
    "no turn, but b is to come": lambda s: setattr(s.devices[0], "turn", None),
    "lacks bytes of z, which is no model": lambda s: s.devices[0].missing_bytes.update(z=1),
    "lacks -1 bytes of a": lambda s: s.devices[0].missing_bytes.update(a=-1),
    "device 0 has unlimited KV room, but requests wait": lambda s: s.devices[0].enqueue(
        s.requests["queued"], must_wait=True
    ),
    "was to have -1 tokens": lambda s: setattr(s.requests["queued"], "expected_tokens", -1),
    "step ratio of nan": lambda s: setattr(s.models["a"].speed(), "step_ratio", float("nan")),
    "has the speed of another kind": lambda s: setattr(
        s.devices[0].batches["a"], "speed", s.models["a"].speed("another")
    ),
    "negative bytes": lambda s: setattr(s.models["a"], "weight_bytes", -1),
}


def test_nobody_waits_for_kv_room_that_nobody_will_give_back() -> None:
    driver = Driver(kv_host_bytes=0)
    state, device = driver.state, driver.state.devices[0]
    driver.send(e.Arrived("r", "a", 0.0, 1))
    request = state.requests["r"]
    device.leave(request)
    request.phase, device.turn = RequestPhase.QUEUED, None
    device.enqueue(request, must_wait=True)
    with pytest.raises(InvariantBroken, match="wait for KV room on device 0, which has nothing"):
        check_state(state)


@pytest.mark.parametrize("message", BREAKS)
def test_a_contradiction_is_named(message: str) -> None:
    state = busy_state()
    BREAKS[message](state)
    with pytest.raises(InvariantBroken, match=message):
        check_state(state)
