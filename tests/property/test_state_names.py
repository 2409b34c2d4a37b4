"""Names and aliases against a plain dict: any sequence of changes agrees with it."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings, strategies as st

from gpupool_state import DATABASE_NAME, Database, Registry
from gpupoold.domain import ModelName, ModelSpec
from gpupoold.errors import GpupoolError, NoSuchModel, Refused, UsageError

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
ALIASES = st.lists(NAMES, max_size=3).map(tuple)
CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "alias", "unalias"]), NAMES, ALIASES), max_size=25
)


class Names:
    """What the registry should do, as a dict from model to its aliases."""

    def __init__(self) -> None:
        self.models: dict[str, tuple[str, ...]] = {}

    def owner(self, name: str) -> str | None:
        """The model that has ``name``."""
        owners = [model for model, own in self.models.items() if name == model or name in own]
        assert len(owners) <= 1
        return owners[0] if owners else None

    def change(self, verb: str, name: str, aliases: tuple[str, ...]) -> type[GpupoolError] | None:
        """Make the change, or say which error it must give."""
        new = {"add": (name, *aliases), "alias": aliases}.get(verb, ())
        if len(set(new)) < len(new):
            return UsageError
        if verb != "add" and name not in self.models:
            return NoSuchModel
        if any(self.owner(each) for each in new):
            return Refused
        return self._make(verb, name, aliases)

    def _make(self, verb: str, name: str, aliases: tuple[str, ...]) -> type[GpupoolError] | None:
        own = self.models.get(name, ())
        if verb == "remove":
            del self.models[name]
        elif verb == "unalias":
            if len(set(aliases)) < len(aliases) or not set(aliases) <= set(own):
                return Refused
            self.models[name] = tuple(alias for alias in own if alias not in aliases)
        else:
            self.models[name] = own + aliases
        return None


async def change(
    registry: Registry, verb: str, name: str, aliases: tuple[str, ...]
) -> type[GpupoolError] | None:
    """Make the change for real; the kind of error it gave."""
    try:
        if verb == "add":
            spec = ModelSpec(name=ModelName(name), source="s", path="/p", aliases=aliases)
            await registry.add(spec)
        elif verb == "remove":
            await registry.remove(name)
        elif verb == "alias":
            await registry.update(name, add_aliases=aliases)
        else:
            await registry.update(name, remove_aliases=aliases)
    except GpupoolError as error:
        return type(error)
    return None


async def agree(changes: list[tuple[str, str, tuple[str, ...]]]) -> None:
    names = Names()
    with tempfile.TemporaryDirectory() as folder:
        async with await Database.open(Path(folder) / DATABASE_NAME) as db:
            registry = Registry(db)
            for step in changes:
                assert await change(registry, *step) == names.change(*step)
                rows = await registry.list()
                assert {str(row.spec.name): row.spec.aliases for row in rows} == names.models
            for name in "abcde":
                row = await registry.get(name)
                assert (None if row is None else row.spec.name) == names.owner(name)


@settings(max_examples=60)
@given(CHANGES)
def test_names_are_unique_over_models_and_aliases(
    changes: list[tuple[str, str, tuple[str, ...]]],
) -> None:
    asyncio.run(agree(changes))
