"""Models and aliases: what is kept, what is refused, and with which words."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from gpupool_state import Database, Registry
from gpupoold.domain import Adapter, ModelSpec, ModelState, Preset, Targets
from gpupoold.errors import NoSuchModel, Refused, UsageError

pytestmark = pytest.mark.asyncio

MakeSpec = Callable[..., ModelSpec]

THINK = Preset("think", {"chat_template_kwargs.enable_thinking": True, "temperature": 0.6}, 20.0)
POET = Adapter("poet", "org/poet", "/adapters/poet", "main", rank=16, number=1, tbt_s=0.2)


async def test_a_model_comes_back_as_it_went_in(
    path: Path, registry: Registry, make_spec: MakeSpec
) -> None:
    spec = make_spec("llama", "chat", "a-later-alias", "b")
    row = await registry.add(spec)
    assert row.spec == spec
    assert row.state is ModelState.REGISTERED
    assert row.created_at == 1_700_000_000.0
    assert (row.error, row.architecture, row.weight_bytes, row.kv_bytes_per_token) == ("", "", 0, 0)
    assert row.loaded_max_model_len is None
    assert await registry.get("llama") == row
    assert await registry.get("chat") == row
    async with await Database.open(path) as again:
        assert await Registry(again).list() == [row]


async def test_a_spec_of_defaults_comes_back(registry: Registry, make_spec: MakeSpec) -> None:
    spec = dataclasses.replace(make_spec(), revision=None, max_model_len=None, dtype="auto")
    assert (await registry.add(spec)).spec == spec


async def test_unknown_names_are_none(registry: Registry) -> None:
    assert await registry.get("nobody") is None
    assert await registry.get("\udcff") is None
    assert await registry.list() == []


async def test_models_are_listed_by_name(registry: Registry, make_spec: MakeSpec) -> None:
    for name in ("qwen", "llama", "phi"):
        await registry.add(make_spec(name))
    assert [row.spec.name for row in await registry.list()] == ["llama", "phi", "qwen"]


@pytest.mark.parametrize("name", ["a", "0", "Qwen/Qwen3-0.6B", "a.b_c:d-e", "x" * 128])
async def test_good_names(registry: Registry, make_spec: MakeSpec, name: str) -> None:
    await registry.add(make_spec(name))
    assert await registry.get(name) is not None


@pytest.mark.parametrize("name", ["", "-a", "/a", "a b", "a\n", "ä", "x" * 129, "a,b", "\udcff"])
async def test_bad_names(registry: Registry, make_spec: MakeSpec, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name or alias"):
        await registry.add(make_spec(name))
    with pytest.raises(UsageError, match="cannot be the name or alias"):
        await registry.add(make_spec("llama", name))
    assert await registry.list() == []
    await registry.add(make_spec())
    with pytest.raises(UsageError, match="cannot be the name or alias"):
        await registry.update("llama", add_aliases=[name])


async def test_one_name_twice_in_a_spec(registry: Registry, make_spec: MakeSpec) -> None:
    for aliases in (("llama",), ("chat", "chat")):
        with pytest.raises(UsageError, match="more than once"):
            await registry.add(make_spec("llama", *aliases))


async def test_a_path_that_is_not_text(registry: Registry, make_spec: MakeSpec) -> None:
    with pytest.raises(UsageError, match="not valid UTF-8"):
        await registry.add(make_spec(path="/models/\udcff"))


@pytest.mark.parametrize(
    ("name", "aliases", "owner"),
    [
        ("llama", [], "'llama' is already registered"),
        ("chat", [], "'chat' is already an alias of model 'llama'"),
        ("qwen", ["llama"], "'llama' is already registered"),
        ("qwen", ["new", "chat"], "'chat' is already an alias of model 'llama'"),
    ],
)
async def test_a_taken_name_is_refused_with_its_owner(
    registry: Registry, make_spec: MakeSpec, name: str, aliases: list[str], owner: str
) -> None:
    before = await registry.add(make_spec("llama", "chat"))
    with pytest.raises(Refused, match=owner):
        await registry.add(make_spec(name, *aliases))
    assert await registry.list() == [before], "nothing of the refused model may stay"
    assert await registry.get("new") is None


async def test_adding_one_name_at_once_lets_one_through(
    registry: Registry, make_spec: MakeSpec
) -> None:
    tries = (registry.add(make_spec("llama")) for _ in range(10))
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(result, Refused) for result in results) == 9
    assert len(await registry.list()) == 1


async def test_targets(registry: Registry, make_spec: MakeSpec) -> None:
    await registry.add(make_spec())
    row = await registry.update("llama", targets=Targets(ttft_s=1.5, tbt_s=0.25))
    assert row.spec.targets == Targets(ttft_s=1.5, tbt_s=0.25)
    assert await registry.get("llama") == row


async def test_aliases_come_and_go(registry: Registry, make_spec: MakeSpec) -> None:
    await registry.add(make_spec("llama", "chat"))
    row = await registry.update("llama", add_aliases=["b", "a"])
    assert row.spec.aliases == ("chat", "b", "a")
    row = await registry.update("llama", remove_aliases=["chat", "a"])
    assert row.spec.aliases == ("b",)
    assert await registry.get("chat") is None
    await registry.add(make_spec("chat"))


async def test_aliases_are_changed_all_or_none(registry: Registry, make_spec: MakeSpec) -> None:
    await registry.add(make_spec("qwen", "fast"))
    before = await registry.add(make_spec("llama", "chat"))
    with pytest.raises(Refused, match="already an alias of model 'qwen'"):
        await registry.update("llama", add_aliases=["new", "fast"])
    with pytest.raises(Refused, match="already an alias of model 'llama'"):
        await registry.update("llama", add_aliases=["chat"])
    with pytest.raises(Refused, match="'fast' is not an alias of model 'llama'"):
        await registry.update("llama", remove_aliases=["chat", "fast"])
    with pytest.raises(Refused, match="'qwen' is already registered"):
        await registry.update(
            "llama", targets=Targets(1, 1), add_aliases=["qwen"], remove_aliases=["chat"]
        )
    assert await registry.get("llama") == before


async def test_an_alias_can_be_replaced_in_one_call(
    registry: Registry, make_spec: MakeSpec
) -> None:
    await registry.add(make_spec("llama", "chat"))
    row = await registry.update("llama", add_aliases=["talk", "chat"], remove_aliases=["chat"])
    assert row.spec.aliases == ("talk", "chat")


async def test_state_and_reason(registry: Registry, make_spec: MakeSpec) -> None:
    await registry.add(make_spec())
    row = await registry.set_state("llama", ModelState.FAILED, "no such folder: /m/\udcff")
    assert (row.state, row.error) == (ModelState.FAILED, "no such folder: /m/?")
    row = await registry.set_state("llama", ModelState.READY)
    assert (row.state, row.error) == (ModelState.READY, "")
    assert await registry.get("llama") == row


async def test_what_loading_shows(registry: Registry, make_spec: MakeSpec) -> None:
    before = await registry.add(make_spec())
    row = await registry.set_loaded(
        "llama",
        architecture="LlamaForCausalLM",
        weight_bytes=16 << 30,
        kv_bytes_per_token=131_072,
        max_model_len=2048,
    )
    assert row == dataclasses.replace(
        before,
        architecture="LlamaForCausalLM",
        weight_bytes=16 << 30,
        kv_bytes_per_token=131_072,
        loaded_max_model_len=2048,
    )
    assert await registry.get("llama") == row


async def test_pins(path: Path, registry: Registry, make_spec: MakeSpec) -> None:
    before = await registry.add(make_spec())
    assert not before.is_pinned
    row = await registry.set_pinned("llama", True)
    assert row == dataclasses.replace(before, is_pinned=True)
    async with await Database.open(path) as again:
        assert await Registry(again).list() == [row]
    assert await registry.set_pinned("llama", False) == before


async def test_removal_frees_the_names(registry: Registry, make_spec: MakeSpec) -> None:
    await registry.add(make_spec("llama", "chat"))
    await registry.remove("llama")
    assert await registry.get("llama") is None
    assert await registry.get("chat") is None
    await registry.add(make_spec("chat", "llama"))


@pytest.mark.parametrize(
    ("name", "told"),
    [("nobody", "no model is named 'nobody'"), ("chat", "an alias of 'llama'"), ("\udcff", "'?'")],
)
async def test_changes_need_a_models_own_name(
    registry: Registry, make_spec: MakeSpec, name: str, told: str
) -> None:
    before = await registry.add(make_spec("llama", "chat"))
    changes = [
        registry.remove(name),
        registry.set_state(name, ModelState.READY),
        registry.update(name, targets=Targets()),
        registry.set_pinned(name, True),
        registry.update(name, add_aliases=["new"]),
        registry.set_loaded(
            name, architecture="", weight_bytes=0, kv_bytes_per_token=0, max_model_len=1
        ),
    ]
    for change in changes:
        with pytest.raises(NoSuchModel) as caught:
            await change
        assert told in caught.value.message
    assert await registry.list() == [before]


async def test_the_list_is_what_the_database_has_after_every_change(
    path: Path, registry: Registry, make_spec: MakeSpec
) -> None:
    changes = (
        lambda: registry.add(make_spec("llama")),
        lambda: registry.add(make_spec("qwen")),
        lambda: registry.update("llama", add_aliases=["chat"]),
        lambda: registry.set_state("llama", ModelState.READY),
        lambda: registry.set_pinned("qwen", True),
        lambda: registry.update("qwen", targets=Targets(ttft_s=7.0, tbt_s=0.7)),
        lambda: registry.remove("llama"),
    )
    async with await Database.open(path) as database:
        for change in changes:
            before = await registry.list()
            await change()
            after = await registry.list()
            assert after == await Registry(database).list() != before
            assert await registry.list() == after


async def test_what_was_read_beside_a_change_is_not_kept(
    registry: Registry, make_spec: MakeSpec
) -> None:
    async with asyncio.TaskGroup() as tasks:
        for index in range(20):
            tasks.create_task(registry.add(make_spec(f"m{index}")))
            tasks.create_task(registry.list())
    assert len(await registry.list()) == 20


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
