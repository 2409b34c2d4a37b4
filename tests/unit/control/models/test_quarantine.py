"""Models that crash workers are shut out."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpupool_state import History, Registry
from gpupoold.config.schema import parse_settings
from gpupoold.control.fleet.states import MAX_CONVICTED, ModelPhase
from gpupoold.control.live_requests import RequestListener
from gpupoold.control.models.parts import ControlParts
from gpupoold.control.models.perform import Failures
from gpupoold.control.processes.supervised import Death
from gpupoold.control.workers.worker import Worker
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.domain import ModelState
from gpupoold.errors import Failed
from gpupoold.system.activity import Activity, ThreadPhase, digest
from gpupoold.wire import messages as m
from tests.unit.control.fleet_box import spec_of
from tests.unit.control.requests.dispatcher_bench import NAME, Bench


class Verdicts(RequestListener):
    """Passes on what concerns the quarantine."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def convicted(self, model: str, request_id: str) -> None:
        self._rig.failures.convicted(model, request_id)

    def acquitted(self, model: str) -> None:
        self._rig.failures.acquitted(model)


class Rig:
    def __init__(self, registry: Registry, history: History) -> None:
        self.registry, self.history = registry, history
        self.bench = Bench(history)
        self.fleet, dispatcher = self.bench.fleet, self.bench.dispatcher
        self.breakers = self.fleet.breakers
        self.bench.worker.state = "ready"
        supervisor = cast(
            WorkerSupervisor, SimpleNamespace(any_in_service=True, workers=[self.bench.worker])
        )
        settings = parse_settings({"devices": ["cuda:0"]}, "test")
        parts = ControlParts(settings, registry, history, self.fleet, dispatcher, supervisor)
        self.failures = Failures(parts)
        self.bench.dispatcher.listener = Verdicts(self)
        self.bench.cold.warm.add(NAME)

    def die(self, *activities: Activity) -> None:
        death = Death("signal 11", True, activities)
        candidates = self.failures.crashed(0, death)
        self.bench.dispatcher.worker_down(self.bench.worker, "died", candidates)
        self.bench.come_back()
        if self.breakers.is_shut_out(NAME):  # then nobody loads it
            self.bench.dispatcher.forget(NAME)

    async def state(self) -> tuple[ModelState, str]:
        """Of the model, as recorded when the controller withdraws a model in quarantine."""
        if (reason := self.breakers.reason(NAME)) is not None:
            await self.failures.record(NAME, reason)
        row = await self.registry.get(NAME)
        assert row is not None
        now = self.fleet.availability(NAME)
        assert (now.state, now.reason) == (row.state, row.error)
        return row.state, row.error

    async def events(self, kind: str) -> list[Any]:
        await self.history.flush()
        return [one for one in await self.history.events_after(0, 1000) if one.kind == kind]


@pytest.fixture
async def rig(registry: Registry, history: History) -> Rig:
    await registry.add(spec_of(NAME))
    await registry.set_state(NAME, ModelState.READY)
    made = Rig(registry, history)
    return made


LOADING = Activity(ThreadPhase.LOAD, NAME)


def step(*ids: str) -> Activity:
    return Activity(ThreadPhase.STEP, NAME, frozenset(map(digest, ids)))


async def test_a_model_whose_load_crashes_twice(rig: Rig) -> None:
    rig.bench.ask("a")
    rig.die(LOADING)
    assert await rig.state() == (ModelState.READY, "")
    rig.die(LOADING)
    state, error = await rig.state()
    assert state is ModelState.FAILED
    assert error.startswith("ended the worker of device 0 twice: signal 11, in the load of llama;")
    assert "next try at" in error
    assert rig.fleet.availability(NAME).phase is ModelPhase.QUARANTINED
    assert isinstance(rig.bench.frontend.sent[-1], m.RequestsFailed)
    [told] = await rig.events("model_quarantined")
    assert told.message == error
    downs = await rig.events("worker_down")
    assert downs[-1].message.endswith("activity: the load of llama")


@pytest.mark.parametrize("has_another", [False, True])
async def test_broken_hardware_is_drained_if_another_device_serves(
    rig: Rig, has_another: bool
) -> None:
    if has_another:
        rig.bench.add_worker()
        another = Worker(1, rig.bench.worker.device, state="ready")
        rig.failures._supervisor.workers.append(another)
    rig.bench.ask("a")
    for _ in range(2):
        death = Death("exit status 1; GPU 0: Xid 48", True, (LOADING, step("a")), True)
        rig.failures.worker_down(rig.bench.worker, death)
        rig.bench.come_back()
    assert await rig.state() == (ModelState.READY, "")
    assert not await rig.events("requests_suspected")
    assert rig.fleet.is_device_draining(0) is has_another
    assert len(await rig.events("drain_began")) == int(has_another)


async def test_a_model_that_no_worker_could_load(rig: Rig) -> None:
    rig.bench.dispatcher.unhost(NAME, rig.bench.worker)
    await rig.failures.not_loaded(NAME, Failed("no such file"))
    await rig.failures.not_loaded(NAME, Failed("no such file"))  # on the next worker
    state, error = await rig.state()
    assert (state, error.partition("; ")[0]) == (ModelState.FAILED, "no such file")
    assert not rig.breakers.is_shut_out(NAME), "a worker that comes up may load it"


async def test_a_bystander_on_turn_is_not_charged(rig: Rig) -> None:
    rig.bench.ask("a")
    grammar = Activity(ThreadPhase.GRAMMAR, "another", frozenset({digest("gone")}))
    for _ in range(5):
        rig.die(grammar)
    assert await rig.state() == (ModelState.READY, "")
    assert rig.bench.frontend.sent == []


async def test_requests_that_each_crash_alone_are_the_models_fault_at_last(rig: Rig) -> None:
    for number in range(MAX_CONVICTED):
        assert (await rig.state())[0] is ModelState.READY
        rig.bench.ask(f"{number}")
        rig.die(step(f"{number}"))
        rig.die(step(f"{number}"))
        assert len(await rig.events("request_convicted")) == number + 1
    assert (await rig.state())[0] is ModelState.FAILED


async def test_a_request_that_crashes_among_others_is_not(rig: Rig) -> None:
    for number in range(2 * MAX_CONVICTED):
        rig.bench.ask(f"{number}")
        rig.die(step(f"{number}"))
        rig.die(step(f"{number}"))
        rig.bench.ask(f"good {number}")
        progress = [m.RequestProgress(f"good {number}", [1], "stop")]
        outputs = m.StepOutputs(NAME, time.monotonic(), [], progress)
        rig.bench.dispatcher.from_worker(rig.bench.worker, outputs)
    assert (await rig.state())[0] is ModelState.READY
