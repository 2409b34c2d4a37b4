"""Models that are not added: not exact, or removed by force while their loads do not stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gpupool_state import History, Registry
from gpupoold.api.schemas_models import AddModelRequest
from gpupoold.control.models import lifecycle
from gpupoold.control.weights.cache import SnapshotId
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import Adapter
from gpupoold.errors import Failed, Refused, TimedOut
from gpupoold.system.activity import ThreadPhase
from tests.unit.checkpoints import samples
from tests.unit.control.models.models_box import ModelsBox, running

FOR_EVER_S = 3600.0


@pytest_asyncio.fixture
async def box(tmp_path: Path, registry: Registry, history: History) -> AsyncIterator[ModelsBox]:
    made = ModelsBox(tmp_path, registry, history, load_timeout_s=FOR_EVER_S)
    async with running(made, "a"):
        yield made


async def test_a_model_that_is_not_exact_is_not_added(box: ModelsBox, tmp_path: Path) -> None:
    source = samples.write(tmp_path / "source", samples.checkpoint())
    request = AddModelRequest(name="new", source=str(source), verify=True)
    box.problem = "migrated after each token, the answer to prompt 0 differs at 7"
    with pytest.raises(Failed, match="new is not exact on device 0: migrated after each token"):
        _ = [line async for line in box.lifecycle.add(request)]
    assert "verify on 0" in box.told
    assert not box.fleet.knows("new")
    box.problem = ""
    lines = [line async for line in box.lifecycle.add(request)]
    assert lines[-1].note.endswith("verified")
    assert box.fleet.knows("new")


async def begun(box: ModelsBox, tmp_path: Path) -> asyncio.Task[list[str]]:
    """An addition whose load does not stop, as with a billion layers."""
    source = samples.write(tmp_path / "source", samples.checkpoint())
    request = AddModelRequest.model_validate({"name": "new", "source": str(source)})
    box.hold(0, 1)

    async def add() -> list[str]:
        return [line.stage async for line in box.lifecycle.add(request)]

    adding = asyncio.create_task(add())
    await box.until(lambda: bool(box.waiting))
    [(_, number)] = box.waiting
    box.processes[number].activity.main.set(ThreadPhase.LOAD, "new")
    return adding


async def test_the_load_of_an_addition_ends_with_its_worker(
    box: ModelsBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "LOAD_GRACE_S", 0.05)
    adding = await begun(box, tmp_path)
    [(_, number)] = box.waiting
    stuck = box.processes[number]
    box.held = {}  # for the next process
    async with asyncio.timeout(20):
        assert (await box.lifecycle.remove("new", "force")).spec.name == "new"
    with pytest.raises(Refused, match="new was removed while being added"):
        await adding
    assert await box.registry.get("new") is None
    assert not box.fleet.knows("new")
    await box.until(lambda: box.processes[number] is not stuck)
    await box.until_ready("a")


async def test_a_removal_does_not_wait_for_a_snapshot_that_is_being_read(
    box: ModelsBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = asyncio.Event()

    async def read_for_ever(_: SnapshotId, nodes: object) -> None:
        reads.set()
        await asyncio.sleep(FOR_EVER_S)

    await box.snapshots.host_budget.drop("a")
    monkeypatch.setattr(box.saved, "read", read_for_ever)
    warming = asyncio.create_task(box.lifecycle.warm("a"))
    async with asyncio.timeout(20):
        await reads.wait()
        await box.lifecycle.remove("a", "refuse")
        with pytest.raises(Failed, match="a was removed"):
            await warming
    assert not box.fleet.knows("a")
    assert box.cache.used_bytes == 0


async def test_a_removal_by_force_overtakes_a_drain(
    box: ModelsBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    unload = box.supervisor.unload

    async def unload_slowly(worker: Worker, name: str) -> None:
        await asyncio.sleep(0.2)  # the drain ends meanwhile
        await unload(worker, name)

    monkeypatch.setattr(box.supervisor, "unload", unload_slowly)
    box.ask("a", "r1")
    draining = asyncio.create_task(box.lifecycle.remove("a", "drain"))
    await box.until(lambda: box.fleet.is_draining("a"))
    async with asyncio.timeout(20):
        await box.lifecycle.remove("a", "force")
        assert (await draining).spec.name == "a"
    assert not box.fleet.knows("a")


async def test_an_adapter_that_comes_before_the_removal_refuses_the_removal(
    box: ModelsBox,
) -> None:
    async with box.fleet.alone("a"):
        removing = asyncio.create_task(box.lifecycle.remove("a", "refuse"))
        await box.until(lambda: box.fleet.is_draining("a"))
        await box.registry.add_further("a", Adapter("late", "late", str(box.folder), "", 8))
    with pytest.raises(Refused, match="a has the adapters late"):
        await removing
    assert await box.registry.get("a") is not None
    assert not box.fleet.is_draining("a")


async def test_a_removal_without_a_worker_that_answers_is_recorded(
    box: ModelsBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    unload = box.supervisor.unload

    async def unload_one(worker: Worker, name: str) -> None:
        if worker.number == 0:
            raise TimedOut("worker 0 did not unload a")
        await asyncio.sleep(0.1)
        await unload(worker, name)
        box.told.append("unloaded")

    monkeypatch.setattr(box.supervisor, "unload", unload_one)
    box.ask("a", "late")
    with pytest.raises(TimedOut, match="did not unload"):
        await box.lifecycle.remove("a", "force")
    assert box.told[-1] == "unloaded"
    assert "model_removed" in await box.events()
    assert await box.registry.get("a") is None
    assert box.dispatcher.live.get("late") is None


async def test_a_load_that_stops_costs_no_worker(
    box: ModelsBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "LOAD_GRACE_S", 0.05)
    adding = await begun(box, tmp_path)
    before = dict(box.processes)
    [(_, number)] = box.waiting
    removing = asyncio.create_task(box.lifecycle.remove("new", "force"))
    box.processes[number].activity.main.set(ThreadPhase.LOAD, "another")
    await asyncio.sleep(0.2)
    box.release()
    await asyncio.wait_for(removing, 20)
    with pytest.raises(Refused):
        await adding
    assert box.processes == before
    assert await box.registry.get("new") is None
