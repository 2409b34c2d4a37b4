"""The simulated device in virtual and in real time: the same orders, the same events."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import pytest
from hypothesis import given, strategies as st

from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import Turn
from gpupoold.sim.clock import EventQueue
from gpupoold.sim.device import BoxDevice, SimDevice
from gpupoold.sim.live import SimLive
from gpupoold.sim.workloads import SimRequest
from gpupoold.simdevice.device import PacedDevice
from gpupoold.simdevice.models import Vocabulary
from gpupoold.wire import messages as m
from tests.sim.box import GB, models

BOX = models("ab")
CAPACITY_BYTES = 80 * GB
BEGIN_S, END_S = 0.5, 60.0


class Driver(Protocol):
    """A device with a driver, and the results so far."""

    token_times_s: dict[str, list[float]]
    ended: list[str]
    turns_s: list[tuple[int, float]]
    missing_bytes: dict[str, int]
    live: dict[str, SimLive]
    sim: SimDevice

    def advance(self, at_s: float) -> None: ...
    def add(self, live: SimLive) -> None: ...
    def attach(self, live: SimLive) -> None: ...
    def plan(self, turn: Turn | None, then: str | None) -> None: ...
    def abort(self, live: SimLive) -> None: ...
    def release(self, live: SimLive) -> None: ...
    def next_due_s(self) -> float | None: ...


class Reported:
    """The results of a device."""

    def __init__(self) -> None:
        self.token_times_s: dict[str, list[float]] = {}
        self.ended: list[str] = []
        self.turns_s: list[tuple[int, float]] = []
        self.missing_bytes: dict[str, int] = {}
        self.live: dict[str, SimLive] = {}


class Virtual(Reported):
    """The device as in the simulator."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: EventQueue[Callable[[], None]] = EventQueue()
        self.sim = SimDevice(0, BoxDevice(CAPACITY_BYTES, BOX), self.queue, self.hear)

    def hear(self, event: e.Event) -> None:
        if isinstance(event, e.Ended):
            self.ended.append(event.request_id)
        elif isinstance(event, e.TurnEnded):
            self.turns_s.append((event.turn_id, self.queue.now_s))
        elif isinstance(event, e.MemoryChanged):
            self.missing_bytes |= event.missing_bytes

    def next_due_s(self) -> float | None:
        return self.queue.next_at_s

    def advance(self, at_s: float) -> None:
        while (due_s := self.queue.next_at_s) is not None and due_s <= at_s:
            due = self.queue.pop()
            assert due is not None
            due.event()
        self.queue.advance_to(at_s)

    def add(self, live: SimLive) -> None:
        self.live[live.request.id] = live
        self.token_times_s[live.request.id] = live.token_times_s
        self.sim.add(live)

    def attach(self, live: SimLive) -> None:
        self.live[live.request.id] = live
        self.token_times_s[live.request.id] = live.token_times_s
        self.sim.attach(live)

    def plan(self, turn: Turn | None, then: str | None) -> None:
        self.sim.plan(turn, then)

    def abort(self, live: SimLive) -> None:
        self.sim.abort([live])

    def release(self, live: SimLive) -> None:
        self.sim.release(live)


class Real(Reported):
    """The device behind messages."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.device = PacedDevice(0, CAPACITY_BYTES, self.hear)
        self.sim = self.device.sim
        for model in BOX.values():
            self.device.add_model(model, Vocabulary.of_size(0))
        self.missing_bytes.clear()

    def hear(self, message: m.Message, fds: Sequence[int] = ()) -> None:
        match message:
            case m.StepOutputs():
                for item in message.progress:
                    times_s = self.token_times_s[item.request_id]
                    times_s += [message.at_s] * len(item.new_token_ids)
                    if item.finish_reason is not None:
                        self.ended.append(item.request_id)
            case m.TurnReport():
                self.turns_s.append((message.turn_id, message.ended_s))
                self.missing_bytes |= message.missing_bytes
            case m.MemoryReport():
                self.missing_bytes |= message.missing_bytes

    def next_due_s(self) -> float | None:
        return self.device.next_due_s

    def advance(self, at_s: float) -> None:
        self.device.advance(at_s)

    def add(self, live: SimLive) -> None:
        self.live[live.request.id] = live
        self.token_times_s[live.request.id] = []
        self.device.add(live)

    def attach(self, live: SimLive) -> None:
        self.live[live.request.id] = live
        self.token_times_s[live.request.id] = []
        self.device.add_migrated(
            live, m.KvTransfer("t", 1, live.context_tokens, [], live.context_tokens)
        )

    def plan(self, turn: Turn | None, then: str | None) -> None:
        if turn is None:
            self.device.end_turn()
        else:
            order = m.RunTurn(turn.turn_id, turn.model, turn.quota_s, then, turn.chunk_tokens)
            self.device.run_turn(order)

    def abort(self, live: SimLive) -> None:
        self.device.abort([live.request.id])

    def release(self, live: SimLive) -> None:
        self.device.migrate_out(m.MigrateOut(live.request.model, live.request.id))


@dataclass(frozen=True)
class Order:
    """An order at a time; ``kind`` "turn" changes the turn under way."""

    kind: str
    at_s: float
    request: SimRequest | None = None
    quota_s: float = 0.0
    chunk_tokens: int | None = None


@dataclass(frozen=True)
class Script:
    """Turns, one after the other, and timed orders."""

    turns: list[Turn]
    orders: list[Order]


def play(driver: Driver, script: Script) -> None:
    """Carry out the orders; a turn that ends is followed at once by the next with work."""
    coming = list(script.turns)
    present: Turn | None = None

    def then() -> str | None:
        models = (one.model for one in coming)
        return next((one for one in models if driver.sim.requests.has_work(one)), None)

    def next_turn() -> None:
        nonlocal present
        while driver.sim.turn is None and (model := then()) is not None:
            index = next(n for n, one in enumerate(coming) if one.model == model)
            present = coming[index]
            del coming[: index + 1]
            driver.plan(present, then())

    def until(at_s: float) -> None:
        while (due_s := driver.next_due_s()) is not None and due_s <= at_s:
            driver.advance(due_s)
            next_turn()
        driver.advance(at_s)

    until(BEGIN_S)
    for order in script.orders:
        until(order.at_s)
        if order.kind == "turn" and driver.sim.turn is not None:
            assert present is not None
            present = replace(present, quota_s=order.quota_s, chunk_tokens=order.chunk_tokens)
            driver.plan(present, then())
        elif order.request is not None:
            carry_out(driver, order)
        next_turn()
        driver.sim.check_memory()
    until(END_S)
    driver.sim.check_memory()


def carry_out(driver: Driver, order: Order) -> None:
    assert order.request is not None
    live = driver.live.get(order.request.id)
    is_here = live is not None and live in driver.sim.requests.all(live.request.model)
    match order.kind:
        case "add":
            driver.add(SimLive(order.request))
        case "attach":
            driver.attach(SimLive(order.request, num_before=1))
        case "abort" if is_here and live is not None:
            driver.abort(live)
        case "release" if is_here and live is not None:
            if live not in driver.sim.requests.attaching:
                driver.release(live)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Times on a grid of 0.1 ms, orders a little off, so that nothing is simultaneous."""
    quotas_s = st.sampled_from((0.0, 0.0313, 0.2, 1.0, math.inf))
    chunks = st.sampled_from((None, 1, 16, 100, 512))
    turns = [
        Turn(number, draw(st.sampled_from("ab")), draw(quotas_s) + 5e-5, draw(chunks))
        for number in range(1, draw(st.integers(1, 6)) + 1)
    ]
    orders = []
    for number in range(draw(st.integers(1, 8))):
        request = SimRequest(
            f"r{number}",
            draw(st.sampled_from("ab")),
            draw(st.integers(0, 4000)) / 1000,
            draw(st.integers(1, 400)),
            draw(st.integers(1, 80)),
        )
        orders.append(
            Order(draw(st.sampled_from(("add", "add", "attach"))), request.arrival_s, request)
        )
        if draw(st.integers(0, 3)) == 0:
            later_s = request.arrival_s + draw(st.integers(0, 3000)) / 1000
            orders.append(Order(draw(st.sampled_from(("abort", "release"))), later_s, request))
    for _ in range(draw(st.integers(0, 4))):
        at_s = draw(st.integers(0, 4000)) / 1000
        orders.append(Order("turn", at_s, None, draw(quotas_s) + 5e-5, draw(chunks)))
    orders.sort(key=lambda one: one.at_s)
    orders = [
        replace(one, at_s=BEGIN_S + one.at_s + 1e-7 * (2 * number + 1))
        for number, one in enumerate(orders)
    ]
    return Script(turns, orders)


def compare(script: Script) -> tuple[Virtual, Real]:
    virtual, real = Virtual(), Real()
    play(virtual, script)
    play(real, script)
    assert set(virtual.token_times_s) == set(real.token_times_s)
    for request_id, times_s in virtual.token_times_s.items():
        assert real.token_times_s[request_id] == pytest.approx(times_s, abs=1e-9)
    assert sorted(virtual.ended) == sorted(real.ended)
    assert [one for one, _ in virtual.turns_s] == [one for one, _ in real.turns_s]
    times_s = [at_s for _, at_s in virtual.turns_s]
    assert [at_s for _, at_s in real.turns_s] == pytest.approx(times_s, abs=1e-9)
    assert virtual.missing_bytes == real.missing_bytes
    assert virtual.sim.memory.resident == real.sim.memory.resident
    return virtual, real


@given(scripts())
def test_the_same_orders_give_the_same_events(script: Script) -> None:
    compare(script)


def test_chunked_prefill_gives_the_same_events() -> None:
    """Steps of 10 ms; 59 prompt tokens beside the answer in 15.9 ms, then 41 in 14.1 ms."""
    first, second = SimRequest("first", "a", 0.0, 100, 100), SimRequest("second", "a", 1.0, 100, 50)
    orders = [Order("add", BEGIN_S, first), Order("add", 1.8333, second)]
    _, real = compare(Script([Turn(1, "a", 60.0, 60)], orders))
    first_s, second_s = real.token_times_s["first"], real.token_times_s["second"]
    began_s = max(at_s for at_s in first_s if at_s < 1.8433)
    assert second_s[0] - began_s == pytest.approx(0.0159 + 0.0141, abs=0.01)
    assert max(b - a for a, b in itertools.pairwise(first_s)) == pytest.approx(0.0159)
    assert (len(first_s), len(second_s)) == (100, 50)
