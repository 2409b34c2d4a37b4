"""What the daemon says of requests that no scheduling core knows of, and of models."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from gpupool_state import DATABASE_NAME, Database, History, Registry
from gpupoold.config.sections import DeviceSettings
from gpupoold.control.models.parts import ControlParts
from gpupoold.control.views.explain import Explainer
from gpupoold.domain import DeviceActivity, ModelName, ModelSpec, ModelState, Targets
from gpupoold.errors import NoSuchModel, UsageError
from gpupoold.frontend.request_context import RequestIds
from gpupoold.wire import messages as m
from tests.unit.control.requests.dispatcher_bench import NAME, Bench, due_to


class Told:
    """A dispatcher with one worker that has one cold model, and who explains it."""

    def __init__(self, db: Database, history: History) -> None:
        self.registry, self.history = Registry(db), history
        self.bench = Bench(history)
        parts = ControlParts(
            cast(Any, None),
            self.registry,
            history,
            self.bench.fleet,
            self.bench.dispatcher,
            cast(Any, SimpleNamespace(workers=[self.bench.worker])),
        )
        self.explainer = Explainer(parts, self.bench.box.cache)


@pytest_asyncio.fixture
async def told(tmp_path: Path) -> AsyncIterator[Told]:
    async with await Database.open(tmp_path / DATABASE_NAME) as db:
        history = History(db, flush_interval_s=60)
        await history.start()
        made = Told(db, history)
        await made.registry.add(ModelSpec(ModelName(NAME), "s", "/p", targets=Targets()))
        await made.registry.set_state(NAME, ModelState.READY)
        yield made
        await history.stop()


async def test_a_request_whose_model_is_not_in_host_memory(told: Told) -> None:
    told.bench.ask("cmpl-1")
    request = (await told.explainer.why("cmpl-1")).request
    assert request is not None
    assert (request.standing, request.device, request.next_token_in_s) == ("loading", None, None)
    assert request.text == f"waits until {NAME} is in host memory"
    model = (await told.explainer.why(NAME)).model
    assert model is not None
    assert model.standings == {"loading": 1}
    assert model.text == "ready: requests wait until the model is in host memory"


async def test_a_request_that_may_have_crashed_a_worker(told: Told) -> None:
    told.bench.cold.warm.add(NAME)
    for request_id in ("cmpl-1", "cmpl-2"):
        told.bench.ask(request_id)
    crashed = due_to("cmpl-1", "cmpl-2")
    told.bench.dispatcher.worker_down(told.bench.worker, "died", crashed)
    told.bench.come_back()
    request = (await told.explainer.why("cmpl-2")).request
    assert request is not None
    assert request.standing == "suspect"
    assert "tried alone" in request.text
    model = (await told.explainer.why(NAME)).model
    assert model is not None
    assert model.standings == {"suspect": 1, "prefilling": 1}


async def test_a_client_names_its_request_by_what_it_saw(told: Told) -> None:
    http_id = RequestIds().http_id
    samples = [f"0_{http_id}", f"1_{http_id}"]
    for request_id in samples:
        told.bench.ask(request_id)
    for seen in (http_id, f"chatcmpl-{http_id}", f"resp_{http_id}"):
        request = (await told.explainer.why(seen)).request
        assert request is not None
        assert (request.request_id, request.also_live) == (samples[0], samples[1:])
    alone = (await told.explainer.why(samples[1])).request
    assert alone is not None
    assert (alone.request_id, alone.also_live) == (samples[1], [])
    with pytest.raises(NoSuchModel) as none:
        await told.explainer.why("chatcmpl-mine")
    assert "x-request-id" in (none.value.hint or "")


async def test_a_request_that_is_scheduled(told: Told) -> None:
    told.bench.cold.warm.add(NAME)
    told.bench.ask("cmpl-1")
    request = (await told.explainer.why("cmpl-1")).request
    assert request is not None
    assert request.turns is not None
    assert (request.standing, request.rule, request.turns.on_turn) == (
        "prefilling",
        "only-device",
        NAME,
    )
    model = (await told.explainer.why(NAME)).model
    assert model is not None
    assert (model.text, model.standings) == ("ready: 1 live request", {"prefilling": 1})
    assert model.first_token_in_s is not None
    told.bench.fleet.set_wait(NAME, "host memory for the weights")
    model = (await told.explainer.why(NAME)).model
    assert model is not None
    assert model.text == "ready: 1 live request; waits for host memory for the weights"


async def test_a_part_of_an_id_will_do_if_it_is_one_requests(told: Told) -> None:
    told.bench.ask("ab12")
    told.bench.ask("ab123")
    assert (await told.explainer.why("b123")).request is not None
    for name in ("ab12", "cmpl-ab12", "chatcmpl-ab12"):
        exact = (await told.explainer.why(name)).request
        assert exact is not None
        assert exact.request_id == "ab12"
    with pytest.raises(UsageError, match="2 live requests have 'ab' in their id"):
        await told.explainer.why("ab")


async def test_a_request_that_failed_is_told_of_with_what_happened(told: Told) -> None:
    told.bench.ask("cmpl-1", time.monotonic() - 3.0)
    told.history.record_event("error", "warm_failed", NAME, "no checkpoint")
    told.history.record_event("info", "model_added", "another", "of no interest")
    told.bench.dispatcher.fail_waiting(NAME, "it could not be warmed")
    finished = (await told.explainer.why("pl-1")).finished
    assert finished is not None
    assert finished.text.startswith("failed (it could not be warmed), after 3")
    assert finished.text.endswith("s and without a token")
    assert finished.request.error == "it could not be warmed"
    assert [one.kind for one in finished.events] == ["warm_failed"]


@pytest.mark.parametrize(
    ("state", "error", "says"),
    [
        (ModelState.FAILED, "ended the worker twice", "failed: ended the worker twice; try"),
        (ModelState.FAILED, "", "failed: see `gpupool events`; try"),
        (ModelState.LOADING, "", "loading: accepts no requests"),
        (ModelState.READY, "", "no device has the model now"),
    ],
)
async def test_models_that_do_not_serve(
    told: Told, state: ModelState, error: str, says: str
) -> None:
    told.bench.dispatcher.unhost(NAME, told.bench.worker)
    if state is ModelState.FAILED:
        told.bench.fleet.fail(NAME, error)
    elif state is ModelState.LOADING:
        told.bench.fleet.unmounted(NAME)
    model = (await told.explainer.why(NAME)).model
    assert model is not None
    assert model.text.startswith(says)
    assert (model.devices, model.first_token_in_s) == ([], None)


async def test_the_load_beside_the_turns_is_told(told: Told) -> None:
    told.bench.cold.warm.add(NAME)
    told.bench.ask("cmpl-1")
    loading = m.LoadProgress("other", 95.0, "runs the self-check", 1)
    told.bench.worker.status = m.WorkerStatus(
        99.0, DeviceActivity(None, 0, 0, 0), 0.0, [], loading=loading
    )
    request = (await told.explainer.why("cmpl-1")).request
    assert request is not None
    assert request.turns is not None
    assert request.turns.loading is not None
    told_of = request.turns.loading
    assert (told_of.model, told_of.stage) == ("other", "runs the self-check")
    assert (told_of.since_s, told_of.num_waiting) == (4.0, 1)
    await told.registry.add(ModelSpec(ModelName("other"), "s", "/q", targets=Targets()))
    model = (await told.explainer.why("other")).model
    assert model is not None
    assert model.text == "loading for 4s: the worker runs the self-check"


async def test_a_model_whose_devices_are_drained(told: Told) -> None:
    told.bench.cold.warm.add(NAME)
    told.bench.dispatcher.set_draining(0, is_draining=True)
    model = (await told.explainer.why(NAME)).model
    assert model is not None
    assert (model.state, model.text) == (
        "ready",
        "accepts no requests: all devices of the model are being drained",
    )


async def test_a_paused_requests_kv_is_found(told: Told) -> None:
    told.bench.cold.warm.add(NAME)
    told.bench.ask("r")
    dispatcher, worker = told.bench.dispatcher, told.bench.worker
    progress = [m.RequestProgress("r", [1])]
    dispatcher.from_worker(worker, m.StepOutputs(NAME, time.monotonic(), [], progress))
    state = dispatcher.state
    turn = state.devices[0].turn
    assert turn is not None
    state.devices[0].turn = None
    request = (await told.explainer.why("r")).request
    assert request is not None
    assert request.text.endswith("the request's KV is on the device")
    held = m.ModelMemory(model=NAME, **_memory(kv_resident_bytes=1 << 20, kv_host_bytes=3 << 20))
    worker.status = m.WorkerStatus(0.0, DeviceActivity(None, 0, 0, 0), 0.0, [held])
    request = (await told.explainer.why("r")).request
    assert request is not None
    assert "1 MiB are on the device and 3 MiB in host memory" in request.text


def _memory(**some: int) -> dict[str, int]:
    numbers = {"num_live": 0, "num_waiting": 0}
    return numbers | some


async def test_nothing_of_that_name(told: Told) -> None:
    with pytest.raises(NoSuchModel, match="neither a model nor a request is named 'x'"):
        await told.explainer.why("x")


async def test_the_gpus_of_a_group_are_told(told: Told) -> None:
    told.bench.cold.warm.add(NAME)
    told.bench.ask("cmpl-1")
    group = DeviceSettings.model_validate({"kind": "cuda", "gpus": [2, 3]})
    told.bench.worker.device = group
    request = (await told.explainer.why("cmpl-1")).request
    assert request is not None
    assert request.turns is not None
    assert (request.turns.num_gpus, request.turns.gpus) == (2, (2, 3))
