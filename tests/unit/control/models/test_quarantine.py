"""Models that crash workers are shut out, and tried again by themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpupool_state import History, Registry
from gpupoold.config.schema import parse_settings
from gpupoold.control.fleet.circuit_breaker import FIRST_WAIT_S, MAX_CONVICTED
from gpupoold.control.fleet.transitions import ModelPhase
from gpupoold.control.frontends import frontends as frontends_module
from gpupoold.control.models.failures import Failures
from gpupoold.control.models.loader import ModelLoader
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.quarantine import Quarantine
from gpupoold.control.models.reloads import Reloads
from gpupoold.control.models.retries import Retries
from gpupoold.control.models.warming import Warmer
from gpupoold.control.processes.crash_attribution import Death
from gpupoold.control.requests.listener import RequestListener
from gpupoold.control.workers.worker import WorkerEnded
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.domain import ModelState, Targets
from gpupoold.errors import Failed, GpupoolError, Unavailable
from gpupoold.system.activity import Activity, ThreadPhase, digest
from gpupoold.wire import messages as m
from tests.unit.control.fleet_box import spec_of
from tests.unit.control.loaded import loaded
from tests.unit.control.models.models_box import PlayedInspector
from tests.unit.control.requests.dispatcher_bench import NAME, Bench


class Models:
    """What takes a model off the workers, and loads it again; ``errors`` are of its loads."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.withdrawn: list[str] = []
        self.num_tried = 0
        self.errors: list[GpupoolError] = []
        self.mounts: ModelMounts | None = None

    async def cancel(self, model: str) -> None:
        """Nothing is being warmed."""

    async def withdraw(self, model: str) -> None:
        self.withdrawn.append(model)

    async def load_anywhere(self, model: str) -> None:
        self.num_tried += 1
        if self.errors:
            raise self.errors.pop(0)
        assert self.mounts is not None
        self.bench.dispatcher.host(Targets(), loaded(model), None, self.bench.worker)
        await self.mounts.open(spec_of(model))


class Frontends:
    """Takes whatever it is sent."""

    def send(self, message: m.Message) -> None:
        pass

    async def serve(self, model: m.ModelToLoad, loaded: m.LoadedModel) -> None:
        pass


class Verdicts(RequestListener):
    """Passes on what concerns the quarantine."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def answered(self, model: str) -> None:
        self._rig.breakers.answered(model)

    def convicted(self, model: str, request_id: str) -> None:
        self._rig.quarantine.convicted(model, request_id)

    def acquitted(self, model: str) -> None:
        self._rig.quarantine.acquitted(model)


class Rig:
    def __init__(self, registry: Registry, history: History) -> None:
        self.registry, self.history = registry, history
        self.bench = Bench(history)
        self.fleet, dispatcher = self.bench.fleet, self.bench.dispatcher
        self.models, self.breakers = Models(self.bench), self.fleet.breakers
        self.bench.worker.state = "ready"
        supervisor = cast(
            WorkerSupervisor, SimpleNamespace(any_in_service=True, workers=[self.bench.worker])
        )
        settings = parse_settings({"devices": ["cuda:0"]}, "test")
        frontends = cast(frontends_module.Frontends, Frontends())
        inspector = PlayedInspector(settings)
        mounts = ModelMounts(
            settings, registry, history, self.fleet, supervisor, frontends, inspector
        )
        self.models.mounts = mounts
        self.failures = Failures(registry, history, self.fleet, dispatcher, mounts)
        self.quarantine = Quarantine(
            history,
            self.fleet,
            dispatcher,
            cast(ModelLoader, self.models),
            cast(Warmer, self.models),
            self.failures,
            mounts,
        )
        self.bench.dispatcher.listener = Verdicts(self)
        reloads = cast(Reloads, self.models)
        self.retries = Retries(self.fleet, reloads, self.failures)
        self.bench.cold.warm.add(NAME)

    def die(self, *activities: Activity) -> None:
        death = Death("signal 11", True, activities)
        candidates = self.quarantine.crashed(0, death)
        self.bench.dispatcher.worker_down(self.bench.worker, "died", candidates)
        self.bench.come_back()
        if self.breakers.is_shut_out(NAME):  # then nobody loads it
            self.bench.dispatcher.forget(NAME)

    async def state(self) -> tuple[ModelState, str]:
        """Of the model, when all that has been begun is done."""
        await asyncio.gather(*self.quarantine._tasks, *self.retries._tasks)
        row = await self.registry.get(NAME)
        assert row is not None
        now = self.fleet.availability(NAME)
        assert (now.state, now.reason) == (row.state, row.error)
        return row.state, row.error

    async def events(self, kind: str) -> list[Any]:
        await self.history.flush()
        return [one for one in await self.history.events_after(0, 1000) if one.kind == kind]


@pytest.fixture
async def rig(registry: Registry, history: History) -> AsyncIterator[Rig]:
    await registry.add(spec_of(NAME))
    await registry.set_state(NAME, ModelState.READY)
    made = Rig(registry, history)
    yield made
    await made.quarantine.stop()
    await made.retries.stop()


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
    assert rig.models.withdrawn == [NAME]
    assert rig.fleet.availability(NAME).phase is ModelPhase.QUARANTINED
    assert isinstance(rig.bench.frontend.sent[-1], m.RequestsFailed)
    [told] = await rig.events("model_quarantined")
    assert told.message == error
    downs = await rig.events("worker_down")
    assert downs[-1].message.endswith("activity: the load of llama")


async def test_it_is_tried_again_when_its_wait_is_over(rig: Rig) -> None:
    rig.die(LOADING)
    rig.die(LOADING)
    await rig.state()
    now_s = time.monotonic()
    rig.retries.check(now_s + FIRST_WAIT_S - 5.0)
    assert rig.models.num_tried == 0
    rig.retries.check(now_s + FIRST_WAIT_S + 1.0)
    rig.retries.check(now_s + FIRST_WAIT_S + 2.0)
    await rig.state()
    assert rig.models.num_tried == 1
    assert not rig.breakers.is_shut_out(NAME)
    assert len(await rig.events("model_recovered")) == 1


@pytest.mark.parametrize(
    ("error", "wait_s"),
    [
        (Failed("no such file"), 2 * FIRST_WAIT_S),
        (Unavailable("no worker is ready"), FIRST_WAIT_S),
        (WorkerEnded("killed by somebody"), FIRST_WAIT_S),
    ],
    ids=lambda one: type(one).__name__,
)
async def test_a_retry_that_fails(rig: Rig, error: GpupoolError, wait_s: float) -> None:
    rig.die(LOADING)
    rig.die(LOADING)
    await rig.state()
    rig.models.errors = [error]
    rig.retries.check(time.monotonic() + FIRST_WAIT_S + 1.0)
    state, _ = await rig.state()
    assert state is ModelState.FAILED
    retry_in_s = (rig.breakers.retry_at_s(NAME) or 0.0) - time.monotonic()
    assert wait_s - 10.0 < retry_in_s <= wait_s
    rig.retries.check(time.monotonic() + wait_s + 1.0)
    await rig.state()
    assert not rig.breakers.is_shut_out(NAME)


async def test_a_model_that_no_worker_could_load(rig: Rig) -> None:
    rig.bench.dispatcher.unhost(NAME, rig.bench.worker)
    await rig.failures.failed(NAME, "no such file")
    await rig.failures.failed(NAME, "no such file")  # on the next worker
    state, error = await rig.state()
    assert (state, error.partition("; ")[0]) == (ModelState.FAILED, "no such file")
    assert not rig.breakers.is_shut_out(NAME), "a worker that comes up may load it"
    rig.retries.check(time.monotonic() + FIRST_WAIT_S + 1.0)
    await rig.state()
    assert rig.models.num_tried == 1


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
