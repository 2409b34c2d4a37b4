"""Changes of engine options: another engine on each worker, or the earlier one everywhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpupool_state import History, Registry
from gpupoold.api.schemas_models import SetModelRequest
from gpupoold.control.models.descriptions import to_load
from gpupoold.control.models.lifecycle import merged_options
from gpupoold.control.workers.worker import Worker, WorkerEnded
from gpupoold.domain import ModelSpec
from gpupoold.errors import Failed, Unavailable, UsageError
from gpupoold.scheduling.hosting import HostingReason
from tests.unit.control.models.models_box import TIMEOUT_S, ModelsBox, running


@pytest.fixture
async def box(tmp_path: Path, registry: Registry, history: History) -> AsyncIterator[ModelsBox]:
    made = ModelsBox(tmp_path, registry, history, load_timeout_s=TIMEOUT_S)
    async with running(made, "a", "b") as box:
        box.told.clear()
        yield box


def test_changes_are_merged_by_vllms_names() -> None:
    present = {"max_num_seqs": "16", "seed": "1"}
    assert merged_options(present, {}) == present
    assert merged_options(present, {"max-num-seqs": "8", "--seed": None}) == {"max_num_seqs": "8"}
    with pytest.raises(UsageError, match="port"):
        merged_options(present, {"port": "1"})


@pytest.mark.asyncio
async def test_requests_go_on_in_the_new_engines(box: ModelsBox) -> None:
    box.ask("a", "r1")
    await box.until(lambda: any(box.requests.values()))
    assert len(box.requests) == 1
    row = await box.lifecycle.set("a", SetModelRequest(engine={"max-num-seqs": "8"}))
    assert row.spec.engine == {"max_num_seqs": "8"}
    assert sorted(box.told) == ["attach a on 0", "attach a on 1"]
    await box.until(lambda: any(box.requests.values()))
    request = box.dispatcher.live.get("r1")
    assert request is not None
    assert box.frontends.states() == {"a": "ready", "b": "ready"}
    assert box.dispatcher.accounts.meters.models["a"].resumed == 1


@pytest.mark.asyncio
async def test_a_failing_worker_leaves_the_earlier_options_everywhere(box: ModelsBox) -> None:
    first, second = box.fleet.availability("a").devices
    box.errors[f"a on {second}"] = Failed("no memory")
    with pytest.raises(Failed, match="no memory"):
        await box.lifecycle.set("a", SetModelRequest(engine={"max_num_seqs": "8"}))
    assert box.told == [f"attach a on {one}" for one in (first, second, first)]
    row = await box.registry.get("a")
    assert row is not None
    assert row.spec.engine == {}
    assert box.frontends.states() == {"a": "ready", "b": "ready"}


@pytest.mark.asyncio
async def test_options_of_the_api_need_no_other_engine(box: ModelsBox) -> None:
    row = await box.lifecycle.set("a", SetModelRequest(engine={"chat_template": "{{ x }}"}))
    assert row.spec.engine == {"chat_template": "{{ x }}"}
    assert box.told == []


@pytest.mark.asyncio
async def test_a_template_with_another_reasoning_parser_needs_another_engine(
    box: ModelsBox,
) -> None:
    await box.lifecycle.set("a", SetModelRequest(engine={"chat-template": "{{ messages }}"}))
    assert box.told == []
    thinking = "{% if enable_thinking is not false %}<think>{% endif %}"
    await box.lifecycle.set("a", SetModelRequest(engine={"chat-template": thinking}))
    assert sorted(box.told) == ["attach a on 0", "attach a on 1"]


@pytest.mark.asyncio
async def test_an_api_that_cannot_be_mounted_undoes_the_change(box: ModelsBox) -> None:
    box.frontends.error = Failed("a bad template")
    with pytest.raises(Failed, match="a bad template"):
        await box.lifecycle.set("a", SetModelRequest(engine={"max_num_seqs": "8"}))
    box.frontends.error = None
    row = await box.registry.get("a")
    assert row is not None
    assert row.spec.engine == {}


@pytest.mark.asyncio
async def test_a_worker_that_ends_leaves_the_earlier_options(box: ModelsBox) -> None:
    box.deadly.add("a")
    with pytest.raises(WorkerEnded):
        await box.lifecycle.set("a", SetModelRequest(engine={"max_num_seqs": "8"}))
    box.deadly.clear()
    row = await box.registry.get("a")
    assert row is not None
    assert row.spec.engine == {}
    await box.until_ready("a", "b")
    assert [box.fleet.hosts.of("a", number).options for number in (0, 1)] == [{}, {}]


@pytest.mark.asyncio
async def test_a_worker_that_keeps_the_new_options_is_tried_again(box: ModelsBox) -> None:
    first, second = box.fleet.availability("a").devices
    box.errors[f"a on {second}"] = Failed("no memory")
    controller = box.lifecycle.controller
    replace = controller.replace

    async def replaced(name: str, engine: dict[str, str]) -> None:
        try:
            await replace(name, engine)
        finally:
            box.errors[f"a on {first}"] = Failed("no memory either")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "replace", replaced)
        with pytest.raises(Failed, match=r"no memory$"):
            await box.lifecycle.set("a", SetModelRequest(engine={"max_num_seqs": "8"}))
    assert box.fleet.hosts.of("a", first).options == {"max_num_seqs": "8"}
    box.errors.clear()
    await controller.replace("a", {})
    assert box.fleet.hosts.of("a", first).options == {}


@pytest.mark.asyncio
async def test_a_removal_ends_a_change(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    # The change ends at the limit for loads, since the earlier options need loads too.
    async with running(ModelsBox(tmp_path, registry, history), "a", "b") as box:
        box.hold(0, 1)
        change = SetModelRequest(engine={"max_num_seqs": "8"})
        changing = asyncio.create_task(box.lifecycle.set("a", change))
        await box.until(lambda: bool(box.waiting))
        async with asyncio.timeout(20):
            removing = asyncio.create_task(box.lifecycle.remove("a", "force"))
            with pytest.raises(Failed, match="a was removed"):
                await changing
            box.release()
            await removing
        assert await box.registry.get("a") is None
        assert box.frontends.states() == {"b": "ready"}


@pytest.mark.asyncio
async def test_options_are_registered_when_all_engines_have_them(box: ModelsBox) -> None:
    first, second = box.fleet.availability("a").devices
    box.hold(second)
    change = SetModelRequest(engine={"max_num_seqs": "8"})
    changing = asyncio.create_task(box.lifecycle.set("a", change))
    await box.until(lambda: ("a", second) in box.waiting)
    assert box.fleet.hosts.of("a", first).options == {"max_num_seqs": "8"}
    row = await box.registry.get("a")
    assert row is not None
    assert row.spec.engine == {}
    box.release()
    assert (await changing).spec.engine == {"max_num_seqs": "8"}


@pytest.mark.asyncio
async def test_the_earlier_options_come_back_after_two_cancellations(box: ModelsBox) -> None:
    first, second = box.fleet.availability("a").devices
    box.hold(second)
    change = SetModelRequest(engine={"max_num_seqs": "8"})
    changing = asyncio.create_task(box.lifecycle.set("a", change))
    await box.until(lambda: ("a", second) in box.waiting)
    box.held[first] = asyncio.Event()
    changing.cancel()
    box.held.pop(second).set()
    await box.until(lambda: ("a", first) in box.waiting)
    changing.cancel()
    box.release()
    with pytest.raises(asyncio.CancelledError):
        await changing
    assert [box.fleet.hosts.of("a", one).options for one in (first, second)] == [{}, {}]


@pytest.mark.asyncio
async def test_an_engine_that_nobody_waited_for_is_replaced(box: ModelsBox) -> None:
    first, _ = box.fleet.availability("a").devices
    box.hold(first)
    change = SetModelRequest(engine={"max_num_seqs": "8"})
    changing = asyncio.create_task(box.lifecycle.set("a", change))
    await box.until(lambda: ("a", first) in box.waiting)
    box.lifecycle.controller.abandon("a", "was removed")
    box.release()
    with pytest.raises(Failed, match="a was removed"):
        await changing
    await box.until(lambda: box.told == [f"attach a on {first}"] * 2)
    assert box.fleet.hosts.of("a", first).options == {}


@pytest.mark.asyncio
async def test_requests_of_a_replaced_engine_go_on_though_nobody_waits(box: ModelsBox) -> None:
    box.ask("a", "r1")
    await box.until(lambda: any(box.requests.values()))
    [number] = box.requests
    box.hold(number)
    row = await box.registry.get("a")
    assert row is not None
    worker, room = box.supervisor.workers[number], HostingReason.NEEDED
    replacing = asyncio.create_task(
        box.lifecycle.controller._performer._replace(row, worker, room), name="replace"
    )
    await box.until(lambda: ("a", number) in box.waiting)
    replacing.cancel()
    box.release()
    await box.until(lambda: box.dispatcher.accounts.meters.models["a"].resumed == 1)
    await box.until(lambda: any(box.requests.values()))


@pytest.mark.asyncio
async def test_a_load_that_was_given_up_does_not_answer_the_next(box: ModelsBox) -> None:
    row = await box.registry.get("a")
    assert row is not None
    worker, model = box.supervisor.workers[0], to_load(row.spec, box.lifecycle._settings)
    box.errors["a on 0"] = Failed("no memory")
    box.hold(0)
    given_up = asyncio.create_task(box.supervisor.load(worker, model, None))
    await box.until(lambda: ("a", 0) in box.waiting)
    given_up.cancel()
    wanted = asyncio.create_task(box.supervisor.load(worker, model, None))
    first, box.held[0] = box.held[0], asyncio.Event()
    first.set()
    await box.until(lambda: "build a on 0" in box.told)
    box.errors.clear()
    box.release()
    loaded, fd = await wanted
    assert (loaded.model.name, fd is not None) == ("a", True)
    os.close(fd or -1)


@pytest.mark.asyncio
async def test_targets_and_aliases_change_beside_a_load(box: ModelsBox) -> None:
    await box.until(lambda: all(one.has_loaded for one in box.supervisor.workers))
    box.hold(1)
    box.processes[1].end(-signal.SIGKILL)
    await box.until(lambda: bool(box.waiting))
    [(name, _)] = box.waiting
    async with asyncio.timeout(TIMEOUT_S / 2):
        await box.lifecycle.set(name, SetModelRequest(ttft_s=0.123, add_aliases=["alias"]))
    assert box.frontends.aliases[name] == ("alias",)
    box.release()
    await box.until_ready("a", "b")
    assert box.dispatcher.state.models[name].targets.ttft_s == 0.123
    await box.until(lambda: box.targets.get((name, 1)) == 0.123)


@pytest.mark.asyncio
async def test_a_removal_without_a_mode_waits_for_a_change(box: ModelsBox) -> None:
    box.hold(0, 1)
    change = SetModelRequest(engine={"max_num_seqs": "8"})
    changing = asyncio.create_task(box.lifecycle.set("a", change))
    await box.until(lambda: bool(box.waiting))
    removing = asyncio.create_task(box.lifecycle.remove("a", "refuse"))
    await box.until(lambda: box.fleet.is_draining("a"))
    box.release()
    assert (await changing).spec.engine == {"max_num_seqs": "8"}
    await removing
    assert await box.registry.get("a") is None


@pytest.mark.asyncio
async def test_no_load_begins_with_the_targets_before_a_change(box: ModelsBox) -> None:
    await box.until(lambda: all(one.has_loaded for one in box.supervisor.workers))
    lane, killed = box.lifecycle.controller._lanes["a"], box.processes[1]
    box.errors["a on 1"] = Failed("no memory")
    killed.end(-signal.SIGKILL)
    await box.until(lambda: "load 1" in lane.waits and not lane.steps)
    box.errors.clear()
    lane.waits.clear()
    box.hold(1)
    change = SetModelRequest(engine={"max_num_seqs": "8"}, ttft_s=0.123)
    await box.lifecycle.set("a", change)
    box.release()
    await box.until(lambda: box.hosts_of("a") == [0, 1])
    assert box.dispatcher.state.models["a"].targets.ttft_s == 0.123


@pytest.mark.asyncio
async def test_no_snapshot_is_left_when_a_removal_ends_a_change(
    box: ModelsBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks_up, look_up = asyncio.Event(), box.snapshots._look_up

    async def look_up_slowly(spec: ModelSpec, worker: Worker) -> int | None:
        if not looks_up.is_set():
            looks_up.set()
            await asyncio.Event().wait()
        return await look_up(spec, worker)

    monkeypatch.setattr(box.snapshots, "_look_up", look_up_slowly)
    change = SetModelRequest(engine={"max_num_seqs": "8"})
    changing = asyncio.create_task(box.lifecycle.set("a", change))
    async with asyncio.timeout(TIMEOUT_S):
        await looks_up.wait()
        assert memfds("a")
        await box.lifecycle.remove("a", "force")
        with pytest.raises(Failed, match="a was removed"):
            await changing
    assert memfds("a") == []


def memfds(name: str) -> list[str]:
    """The open files in memory with this name."""
    targets = []
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the folder
            targets.append(os.readlink(f"/proc/self/fd/{one}"))
    return [one for one in targets if one.startswith(f"/memfd:{name} ")]


@pytest.mark.asyncio
async def test_a_stop_ends_a_change(box: ModelsBox) -> None:
    await box.lifecycle.set("a", SetModelRequest(engine={"max_num_seqs": "4"}))
    box.hold(0, 1)
    change = SetModelRequest(engine={"max_num_seqs": "8"})
    changing = asyncio.create_task(box.lifecycle.set("a", change))
    await box.until(lambda: bool(box.waiting))
    async with asyncio.timeout(TIMEOUT_S / 2):
        await box.supervisor.stop()
        await box.lifecycle.stop()
        with pytest.raises(WorkerEnded, match="the daemon is stopping"):
            await changing
        with pytest.raises(Unavailable, match="the daemon is stopping"):
            await box.lifecycle.controller.replace("a", {})
    row = await box.registry.get("a")
    assert row is not None
    assert row.spec.engine == {"max_num_seqs": "4"}
