"""Models on two played workers: loaded, warmed, unloaded, lost, changed and removed."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio

from gpupool_state import History, ModelRow, Registry
from gpupoold.api.schemas_models import AddModelRequest, Progress, SetModelRequest
from gpupoold.control.fleet.states import HostPhase, ModelPhase
from gpupoold.control.weights.cache import SnapshotId
from gpupoold.domain import ModelSpec, ModelState, Targets
from gpupoold.errors import Failed, GpupoolError, NoSuchModel, Refused, TimedOut
from gpupoold.wire import messages as m
from tests.unit.checkpoints.samples import checkpoint, write
from tests.unit.control.models.models_box import TIMEOUT_S, ModelsBox, running


@pytest_asyncio.fixture
async def box(tmp_path: Path, registry: Registry, history: History) -> AsyncIterator[ModelsBox]:
    async with running(ModelsBox(tmp_path, registry, history), "a", "b") as made:
        made.told.clear()
        yield made


async def test_a_snapshot_is_built_once_and_attached_to_the_other_worker(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    async with running(ModelsBox(tmp_path, registry, history), "a") as box:
        assert sorted(one.split()[0] for one in box.told) == ["attach", "build"]
        assert box.frontends.mounted == {"a"}
        assert box.frontends.states() == {"a": "ready"}
        assert all(box.fleet.hosts.of("a", number).has_snapshot for number in (0, 1))
        row = await registry.get("a")
        assert row is not None
        assert (row.state, row.loaded_max_model_len) == (ModelState.READY, 100)


async def test_an_addition_is_a_use(box: ModelsBox) -> None:
    used_at = box.cache.last_used_at("a")
    assert used_at is not None
    assert 0 <= time.time() - used_at < 60


async def test_a_killed_worker_loads_all_again_while_the_other_serves(box: ModelsBox) -> None:
    box.frontends.lists.clear()
    box.processes[1].end(-signal.SIGKILL)
    await box.until(lambda: len(box.told) == 2)
    await box.until_ready("a", "b")
    assert sorted(box.told) == ["attach a on 1", "attach b on 1"]
    assert set(box.frontends.states_of("a")) <= {"ready"}


async def test_a_model_without_workers_is_loading_and_then_ready(box: ModelsBox) -> None:
    box.frontends.lists.clear()
    for process in list(box.processes.values()):
        process.end(-signal.SIGKILL)
    await box.until(lambda: "loading" in box.frontends.states_of("a"))
    await box.until_ready("a", "b")
    await box.until(lambda: box.frontends.states_of("a")[-1] == "ready")
    assert "model_recovered" not in await box.events()


async def test_a_model_is_ready_again_with_its_first_load(
    box: ModelsBox,
) -> None:
    box.slow.add("b")
    box.snapshots.touch("a")  # the model that is loaded first
    for process in list(box.processes.values()):
        process.end(-signal.SIGKILL)
    await box.until(lambda: set(box.frontends.states().values()) == {"loading"})
    await box.until(lambda: box.frontends.states() == {"a": "ready", "b": "loading"})


async def test_requests_of_a_dropped_snapshot_warm_the_model(box: ModelsBox) -> None:
    await box.snapshots.host_budget.drop("a")
    assert sorted(box.told) == ["drop a on 0", "drop a on 1"]
    assert not box.fleet.is_warm("a")
    box.ask("a", "r1")
    assert box.dispatcher.live.num_waiting("a") == 1
    await box.until(lambda: not box.dispatcher.live.num_waiting("a"))
    assert box.fleet.is_warm("a")
    assert {"take a on 0", "take a on 1"} <= set(box.told)  # as read from disk
    assert box.fleet.hosts.of("a", 0).phase is HostPhase.ATTACHED


async def test_a_snapshot_that_is_nowhere_is_built_again(box: ModelsBox) -> None:
    await box.snapshots.host_budget.drop("a")
    await box.saved.stop()
    box.saved.budget_bytes = 0
    await box.lifecycle.warm("a")
    assert box.fleet.is_warm("a")
    assert [one.split()[0] for one in box.told if " a " in one] == [
        "drop",
        "drop",
        "unload",
        "build",
        "take",
    ]


async def test_requests_fail_when_their_model_cannot_be_warmed(box: ModelsBox) -> None:
    await box.snapshots.host_budget.drop("a")
    box.take_problem = "no memory"
    box.ask("a", "r1")
    await box.until(lambda: not box.dispatcher.live.num_of("a"))
    [failed] = [one for one in box.replies if isinstance(one, m.RequestsFailed)]
    assert "could not be warmed: worker" in failed.message
    assert "cannot attach the snapshot of a: no memory" in failed.message
    assert "warm_failed" in await box.events()
    box.take_problem = ""
    await box.lifecycle.warm("a")
    assert box.fleet.is_warm("a")


async def test_damaged_weights_are_made_again_everywhere(box: ModelsBox) -> None:
    box.ask("a", "r1")
    worker = box.supervisor.workers[0]
    box.dispatcher.from_worker(worker, m.WrongAnswer("a", (1,), (2,)))
    assert not box.dispatcher.live.num_of("a")
    await box.until(lambda: box.fleet.is_warm("a"))
    told = sorted(one.split()[0] for one in box.told)
    assert told == ["abort", "attach", "build", "unload", "unload"]
    assert "self_check_failed" in await box.events()


async def test_a_model_that_no_worker_can_load_has_failed_and_is_tried_again(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    box = ModelsBox(tmp_path, registry, history)
    await box.register("a", "b")
    box.errors["a"] = Failed("no such layer")
    await box.start()
    try:
        await box.until_ready("b")
        await box.until(lambda: box.fleet.availability("a").state is ModelState.FAILED)
        now = box.fleet.availability("a")
        assert now.phase is ModelPhase.FAILED
        assert now.reason.startswith("no such layer; next try at")
        assert now.retry_at_s is not None
        await box.until(lambda: box.frontends.states() == {"a": "failed", "b": "ready"})
        box.errors.clear()
        box.lifecycle.controller.check(now.retry_at_s + 1.0)
        await box.until_ready("a")
        row = await registry.get("a")
        assert row is not None
        assert (row.state, row.error) == (ModelState.READY, "")
        assert "model_recovered" in await box.events()
    finally:
        await box.stop()


async def test_a_deadly_model_is_in_quarantine_until_a_user_wants_it(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    box = ModelsBox(tmp_path, registry, history)
    await box.register("a", "b")
    box.deadly.add("a")
    await box.start()
    try:
        await box.until(lambda: box.fleet.availability("a").phase is ModelPhase.QUARANTINED)
        await box.until_ready("b")
        assert "ended the worker" in box.fleet.availability("a").reason
        assert box.frontends.mounted == {"b"}
        box.deadly.clear()
        await box.lifecycle.warm("a")
        await box.until_ready("a", "b")
    finally:
        await box.stop()


async def test_a_model_in_quarantine_is_tried_again_on_one_device(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    box = ModelsBox(tmp_path, registry, history)
    await box.register("a", "b")
    box.deadly.add("a")
    await box.start()
    try:
        await box.until(lambda: box.fleet.availability("a").phase is ModelPhase.QUARANTINED)
        await box.until_ready("b")
        await box.until(lambda: all(one.has_loaded for one in box.supervisor.workers))
        told = len(box.told)
        box.lifecycle.controller.check(time.monotonic() + 3600.0)
        await box.until(lambda: not box.fleet.breakers.is_half_open("a"))
        assert [one for one in box.told[told:] if one.split()[1] == "a"] in (
            ["build a on 0"],
            ["build a on 1"],
        )
        box.deadly.clear()
        await box.until_ready("b")
        box.lifecycle.controller.check(time.monotonic() + 7200.0)
        await box.until_ready("a", "b")
        assert "model_recovered" in await box.events()
    finally:
        await box.stop()


async def test_a_removed_model_is_nowhere(box: ModelsBox) -> None:
    await box.lifecycle.remove("a", "refuse")
    # A removal ends when the memory of the snapshot is free.
    for number in range(2):
        told = [one for one in box.told if one.endswith(str(number))]
        assert told == [f"drop a on {number}", f"unload a on {number}"]
    assert box.frontends.mounted == {"b"}
    assert box.frontends.states() == {"b": "ready"}
    assert not box.fleet.knows("a")
    assert box.cache.get(SnapshotId("a")) is None
    assert await box.registry.get("a") is None
    with pytest.raises(NoSuchModel, match="registered: b") as raised:
        await box.lifecycle.find("a")
    assert raised.value.hint == "registered: b"


async def test_a_drain_that_lasts_too_long_changes_nothing(box: ModelsBox) -> None:
    box.ask("a", "r1")
    with pytest.raises(Refused, match="a has 1 live requests"):
        await box.lifecycle.remove("a", "refuse")
    removal = asyncio.create_task(box.lifecycle.remove("a", "drain"))
    await box.until(lambda: box.frontends.states()["a"] == "draining")
    assert box.fleet.availability("a").phase is ModelPhase.DRAINING
    with pytest.raises(Refused, match="being unloaded or removed"):
        await box.cache_control.unload("a", "drain")
    with pytest.raises(TimedOut, match="1 requests still run"):
        await removal
    assert box.fleet.availability("a").can_serve
    assert box.frontends.states()["a"] == "ready"
    await box.lifecycle.remove("a", "force")
    assert [one.message for one in box.replies if isinstance(one, m.RequestsFailed)] == [
        "a was removed"
    ]


async def test_targets_and_aliases_change_while_it_serves(box: ModelsBox) -> None:
    box.frontends.mounted.clear()
    row = await box.lifecycle.set("a", SetModelRequest(ttft_s=2.0, add_aliases=["alias"]))
    assert row.spec.targets == box.fleet.targets("a") == Targets(2.0, Targets().tbt_s)
    assert box.dispatcher.state.models["a"].targets == row.spec.targets
    assert box.frontends.mounted == {"a"}  # under the alias too
    assert box.frontends.lists[-1].models[0].aliases == ("alias",)


async def test_a_frontend_that_cannot_mount_fails_the_addition(box: ModelsBox) -> None:
    box.frontends.error = Failed("no such parser")
    with pytest.raises(Failed, match="no such parser"):
        await added(box, "new")
    assert not box.fleet.knows("new")
    assert await box.registry.get("new") is None
    assert "model_refused" in await box.events()
    box.frontends.error = None
    assert (await added(box, "new"))[-1].stage == "ready"


async def test_the_same_name_is_added_once_at_a_time(box: ModelsBox) -> None:
    box.slow.add("new")
    first = asyncio.create_task(added(box, "new"))
    await box.until(lambda: box.fleet.availability("new").phase is ModelPhase.LOADING)
    with pytest.raises(Refused, match="'new' is already registered"):
        await added(box, "new")
    with pytest.raises(TimedOut, match="not loaded within"):
        await first
    box.slow.clear()
    async for _ in box.lifecycle.add(request(box, "new")):  # leaves at the first line
        assert box.fleet.availability("new").phase is ModelPhase.PROPOSED
        with pytest.raises(Refused, match="'new' is being added already"):
            await added(box, "new")
        break
    await box.until(lambda: box.fleet.availability("new").phase is ModelPhase.REMOVED)
    stages = [one.stage for one in await added(box, "new")]
    assert stages == ["resolve", "check", "load", "spread", "ready"]
    assert box.fleet.availability("new").can_serve


async def test_a_model_that_waits_for_room_in_host_memory(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    async with running(ModelsBox(tmp_path, registry, history, num_snapshots=1), "a") as box:
        await box.register("b")
        box.ask("a", "r1")  # its snapshot stays
        with pytest.raises(GpupoolError, match="does not fit in the model cache"):
            await box.lifecycle.warm("b")
        box.dispatcher.cancel("r1", "enough")
        await box.lifecycle.warm("b")
        assert box.fleet.is_warm("b")
        assert not box.fleet.is_warm("a")


def request(box: ModelsBox, name: str) -> AddModelRequest:
    folder = write(box.folder / name, checkpoint())
    return AddModelRequest(name=name, source=str(folder))


async def added(box: ModelsBox, name: str) -> list[Progress]:
    return [line async for line in box.lifecycle.add(request(box, name))]


@pytest.mark.parametrize("seconds", [0.0, 0.002, 0.01, 0.05])
async def test_an_addition_whose_reader_leaves_leaves_nothing(
    box: ModelsBox, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    add = box.registry.add

    async def add_slowly(spec: ModelSpec) -> ModelRow:
        row = await add(spec)
        await asyncio.sleep(0.02)  # a cancellation may come after the commit
        return row

    monkeypatch.setattr(box.registry, "add", add_slowly)
    box.hold(0, 1)
    adding = cast("AsyncGenerator[Progress, None]", box.lifecycle.add(request(box, "c")))
    async with aclosing(adding) as steps:
        while (await anext(steps)).stage != "load":
            pass
        reader = asyncio.ensure_future(anext(steps))
        await asyncio.sleep(seconds)
        reader.cancel()
        await asyncio.wait([reader])
    box.release()
    async with asyncio.timeout(TIMEOUT_S):
        while True:  # the name is free once the addition is undone
            with suppress(Refused):
                lines = await added(box, "c")
                break
            await asyncio.sleep(0.005)
    assert lines[-1].stage == "ready"
