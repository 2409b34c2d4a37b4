"""Changes of engine options: another engine on each worker, or the earlier one everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpupool_state import History, Registry
from gpupoold.api.schemas_models import SetModelRequest
from gpupoold.control.models.lifecycle import merged_options
from gpupoold.control.workers.worker import WorkerEnded
from gpupoold.errors import Failed, UsageError
from tests.unit.control.models.models_box import ModelsBox, running


@pytest.fixture
async def box(tmp_path: Path, registry: Registry, history: History) -> AsyncIterator[ModelsBox]:
    async with running(ModelsBox(tmp_path, registry, history), "a", "b") as box:
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
    assert box.dispatcher.accounts.meters.model("a").resumed == 1


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

    async def replaced(name: str) -> None:
        try:
            await replace(name)
        finally:
            box.errors[f"a on {first}"] = Failed("no memory either")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "replace", replaced)
        with pytest.raises(Failed, match=r"no memory$"):
            await box.lifecycle.set("a", SetModelRequest(engine={"max_num_seqs": "8"}))
    assert box.fleet.hosts.of("a", first).options == {"max_num_seqs": "8"}
    box.errors.clear()
    await controller.replace("a")
    assert box.fleet.hosts.of("a", first).options == {}


@pytest.mark.asyncio
async def test_a_removal_ends_a_change(box: ModelsBox) -> None:
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
