"""Models that a group of GPUs cannot divide: refused before a download, hosted elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gpupool_state import History, Registry
from gpupoold.api.schemas_models import AddModelRequest, Progress
from gpupoold.engine_versions import installed_version
from gpupoold.errors import Refused
from tests.unit.checkpoints.samples import checkpoint, write
from tests.unit.control.models.models_box import TIMEOUT_S, ModelsBox, running

GROUP_AND_SINGLE = ("cuda:0-3", "cuda:4")
TWO_GROUPS = ("cuda:0-3", "cuda:4-5")


async def up(box: ModelsBox) -> None:
    await box.until(lambda: all(one.has_loaded for one in box.supervisor.workers))


@pytest_asyncio.fixture
async def mixed(tmp_path: Path, registry: Registry, history: History) -> AsyncIterator[ModelsBox]:
    """Device 0 is a group of four GPUs, device 1 a single GPU."""
    box = ModelsBox(tmp_path, registry, history, load_timeout_s=TIMEOUT_S, devices=GROUP_AND_SINGLE)
    async with running(box):
        await up(box)
        yield box


@pytest_asyncio.fixture
async def groups(tmp_path: Path, registry: Registry, history: History) -> AsyncIterator[ModelsBox]:
    box = ModelsBox(tmp_path, registry, history, load_timeout_s=TIMEOUT_S, devices=TWO_GROUPS)
    async with running(box):
        await up(box)
        yield box


async def added(box: ModelsBox, devices: tuple[int, ...] = (), **config: object) -> list[Progress]:
    path = write(box.folder / "checkpoint", checkpoint(**config))
    request = AddModelRequest(name="new", source=str(path), devices=list(devices))
    return [line async for line in box.lifecycle.add(request)]


async def test_a_model_is_hosted_where_it_can_be_divided(mixed: ModelsBox) -> None:
    await added(mixed, num_attention_heads=6)
    assert mixed.hosts_of("new") == [1]
    await mixed.lifecycle.controller.settle("new")
    assert mixed.hosts_of("new") == [1]
    assert [one for one in mixed.told if "on 0" in one] == []


async def test_a_divisible_model_is_hosted_everywhere(mixed: ModelsBox) -> None:
    await added(mixed, num_attention_heads=8, num_key_value_heads=2)
    assert mixed.hosts_of("new") == [0, 1]


async def test_the_size_of_a_group_that_cannot_divide_the_model_does_not_count(
    mixed: ModelsBox,
) -> None:
    group, single = mixed.supervisor.workers
    assert group.ready is not None
    assert single.ready is not None
    group.ready.facts.device_bytes, single.ready.facts.device_bytes = 1 << 30, 1000
    with pytest.raises(Refused, match="do not fit on a device of 1000 B"):
        await added(mixed, num_attention_heads=6)
    await added(mixed, num_attention_heads=8)


async def test_no_device_can_divide_the_model(groups: ModelsBox) -> None:
    with pytest.raises(Refused) as caught:
        await added(groups, num_attention_heads=7)
    assert caught.value.message == (
        "new: the GPUs of a group cannot share the model equally "
        "(2 GPUs: 7 attention heads are not divisible by 2; "
        "4 GPUs: 7 attention heads are not divisible by 4)"
    )
    assert groups.inspector.asked == []
    assert not groups.fleet.knows("new")


async def test_devices_by_hand(mixed: ModelsBox) -> None:
    with pytest.raises(Refused, match="6 attention heads are not divisible by 4"):
        await added(mixed, devices=(0,), num_attention_heads=6)
    await added(mixed, devices=(1,), num_attention_heads=6)
    with pytest.raises(Refused, match="6 attention heads are not divisible by 4"):
        await mixed.lifecycle.place("new", [0, 1])
    row = await mixed.registry.get("new")
    assert row is not None
    assert row.spec.devices == (1,)


async def test_vllm_has_the_last_word_before_a_download(mixed: ModelsBox) -> None:
    mixed.inspector.undivided = {4: "blocks of 128"}
    await added(mixed, num_attention_heads=8)
    assert mixed.hosts_of("new") == [1]


async def test_vllm_refuses_all_groups(groups: ModelsBox) -> None:
    groups.inspector.undivided = {4: "blocks of 128", 2: "blocks of 64"}
    with pytest.raises(Refused, match="2 GPUs: blocks of 64; 4 GPUs: blocks of 128"):
        await added(groups, num_attention_heads=8)


async def test_a_group_that_refuses_a_load_leaves_the_model_to_others(mixed: ModelsBox) -> None:
    mixed.errors["new on 0"] = Refused("new: vLLM cannot load the model: 3 blocks")
    await added(mixed, devices=(0, 1), num_attention_heads=8)
    assert mixed.hosts_of("new") == [1]
    told = len(mixed.told)
    await mixed.lifecycle.controller.settle("new")
    assert mixed.told[told:] == []


async def test_a_registered_model_after_the_box_was_grouped(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    box = ModelsBox(tmp_path, registry, history, load_timeout_s=TIMEOUT_S, devices=GROUP_AND_SINGLE)
    await box.register("old")
    (tmp_path / "old" / "config.json").write_text('{"num_attention_heads": 6}')
    async with running(box):
        await up(box)
        await box.until(lambda: box.hosts_of("old") == [1])


async def test_a_restart_remembers_what_vllm_said(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    box = ModelsBox(tmp_path, registry, history, load_timeout_s=TIMEOUT_S, devices=GROUP_AND_SINGLE)
    box.inspector.undivided = {4: "blocks of 128"}
    async with running(box):
        await up(box)
        await added(box, num_attention_heads=8)
    again = ModelsBox(
        tmp_path, registry, history, load_timeout_s=TIMEOUT_S, devices=GROUP_AND_SINGLE
    )
    again.fleet.restore(await registry.list())
    await again.lifecycle.room.divisions.restore()
    await again.start()
    try:
        await up(again)
        assert again.hosts_of("new") == [1]
        assert [one for one in again.told if "on 0" in one] == []
    finally:
        await again.stop()


async def test_other_options_and_other_versions_of_vllm_need_another_verdict(
    mixed: ModelsBox,
) -> None:
    why = "new: vLLM cannot load the model: 3 blocks"
    mixed.errors["new on 0"] = Refused(why)
    await added(mixed, devices=(0, 1), num_attention_heads=8)
    known = mixed.registry.divisions
    version = installed_version() or ""
    assert await known.of_version(version) == {"new": {4: why}}
    assert await known.of_version("0.1") == {}
    await mixed.registry.set_engine("new", {"quantization": "fp8"})
    assert await known.of_version(version) == {}
    await known.replace("new", version, {4: why})
    await mixed.registry.remove("new")
    await known.replace("new", version, {4: why})
    assert await known.of_version(version) == {}


async def test_the_drafter_must_be_divisible_too(mixed: ModelsBox) -> None:
    drafter = write(mixed.folder / "drafter", checkpoint(num_attention_heads=6))
    path = write(mixed.folder / "checkpoint", checkpoint(num_attention_heads=8))
    engine = {"speculative_config.method": "draft_model", "speculative_config.model": str(drafter)}
    request = AddModelRequest(name="new", source=str(path), engine=engine, devices=[0])
    why = "4 GPUs: the drafter: 6 attention heads are not divisible by 4"
    with pytest.raises(Refused, match=why):
        _ = [line async for line in mixed.lifecycle.add(request)]
    assert not mixed.fleet.knows("new")
    elsewhere = request.model_copy(update={"devices": []})
    _ = [line async for line in mixed.lifecycle.add(elsewhere)]
    assert mixed.hosts_of("new") == [1]
