"""Changes of engine options: another engine on each worker, or the earlier one everywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpupool_state import History, Registry
from gpupoold.api.schemas_models import SetModelRequest
from gpupoold.control.models.lifecycle import merged_options
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
