"""Presets and adapters: further names of a model in the same name space."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from gpupool_state import Database, Registry
from gpupoold.domain import Adapter, ModelSpec, Preset
from gpupoold.errors import NoSuchModel, Refused, UsageError

pytestmark = pytest.mark.asyncio

MakeSpec = Callable[..., ModelSpec]
THINK = Preset("think", {"chat_template_kwargs.enable_thinking": True, "temperature": 0.6}, 20.0)
POET = Adapter("poet", "org/poet", "/adapters/poet", "main", rank=16, number=1, tbt_s=0.2)


async def test_presets_adapters_and_options_come_back(
    path: Path, registry: Registry, make_spec: MakeSpec
) -> None:
    await registry.add(make_spec("llama", "chat"))
    await registry.add_further("llama", THINK)
    await registry.add_further("llama", POET)
    row = await registry.set_engine("llama", {"max_num_seqs": "16"})
    assert (row.spec.presets, row.spec.adapters) == ((THINK,), (POET,))
    assert row.spec.aliases == ("chat",)
    assert row.spec.engine == {"max_num_seqs": "16"}
    async with await Database.open(path) as again:
        assert await Registry(again).list() == [row]
        assert await Registry(again).get("think") == row


async def test_a_spec_is_added_with_further_names(registry: Registry, make_spec: MakeSpec) -> None:
    spec = dataclasses.replace(make_spec("llama"), presets=(THINK,), adapters=(POET,))
    assert (await registry.add(spec)).spec == spec


@pytest.mark.parametrize("name", ["llama", "chat", "think", "qwen"])
async def test_a_taken_name_is_refused(registry: Registry, make_spec: MakeSpec, name: str) -> None:
    await registry.add(make_spec("llama", "chat"))
    await registry.add(make_spec("qwen"))
    await registry.add_further("llama", THINK)
    with pytest.raises(Refused, match=name):
        await registry.add_further("llama", Adapter(name, "s", "/p"))
    with pytest.raises(Refused, match="think"):
        await registry.add(make_spec("think"))
    with pytest.raises(UsageError):
        await registry.add_further("llama", Preset("a name"))


async def test_only_a_further_name_can_be_removed(registry: Registry, make_spec: MakeSpec) -> None:
    await registry.add(make_spec("llama", "chat"))
    await registry.add_further("llama", THINK)
    await registry.add_further("llama", POET)
    for name in ("llama", "chat", "nobody", "\udcff"):
        with pytest.raises(NoSuchModel):
            await registry.remove_further(name)
    with pytest.raises(Refused):
        await registry.update("llama", remove_aliases=["think"])
    row = await registry.remove_further("think")
    assert (row.spec.presets, row.spec.adapters, row.spec.aliases) == ((), (POET,), ("chat",))
    await registry.remove("llama")
    assert await registry.get("poet") is None
