"""Names and aliases of models."""

from __future__ import annotations

from gpupool_state import ModelRow, Registry, check_names
from gpupoold.domain import Adapter, ModelSpec
from gpupoold.errors import NoSuchModel, Refused


async def check_names_free(registry: Registry, names: tuple[str, ...]) -> None:
    """Raise GpupoolError for a name that is invalid or belongs to a model."""
    check_names(names)
    for name in names:
        row = await registry.get(name)
        if row is not None:
            what = "registered" if row.spec.name == name else kind_of(row.spec, name)
            raise Refused(f"{name!r} is already {what}", "choose another name")


def kind_of(spec: ModelSpec, name: str) -> str:
    """Return what a further name of a model is, as words for messages."""
    further = spec.further_named(name)
    if further is None:
        return f"an alias of {spec.name}"
    return f"{'an adapter' if isinstance(further, Adapter) else 'a preset'} of {spec.name}"


def check_own_model(spec: ModelSpec, name: str, what: str) -> None:
    """Check that ``name`` is no preset or adapter: these share the engine and memory of a model.

    Raises:
        Refused: ``name`` is a preset or adapter, and has no ``what`` of its own.
    """
    if spec.further_named(name) is not None:
        raise Refused(
            f"{name} is {kind_of(spec, name)} and has no {what} of its own",
            f"use the name {spec.name}, or remove {name} with `gpupool rm {name}`",
        )


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
