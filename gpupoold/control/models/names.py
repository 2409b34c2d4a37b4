"""Names and aliases of models."""

from __future__ import annotations

from typing import Literal

from gpupool_state import ModelRow, Registry, check_names
from gpupoold.errors import NoSuchModel, Refused

RemoveMode = Literal["refuse", "drain", "force"]


async def check_names_free(registry: Registry, names: tuple[str, ...]) -> None:
    """Raise GpupoolError for a name that is invalid or belongs to a model."""
    check_names(names)
    for name in names:
        row = await registry.get(name)
        if row is not None:
            what = "registered" if row.spec.name == name else f"an alias of {row.spec.name}"
            raise Refused(f"{name!r} is already {what}", "choose another name")


async def find_model(registry: Registry, name: str) -> ModelRow:
    """Return the model of this name or alias.

    Raises:
        NoSuchModel: there is none; the registered names are in the hint.
    """
    row = await registry.get(name)
    if row is None:
        names = ", ".join(row.spec.name for row in await registry.list())
        raise NoSuchModel(f"no model is named {name!r}", f"registered: {names or 'none'}")
    return row
