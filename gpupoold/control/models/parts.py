"""What all operations on models use: the parts below, names, and waits for requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass

from gpupool_state import History, ModelRow, Registry, check_names
from gpupoold.config.schema import Settings
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.domain import Adapter, ModelSpec
from gpupoold.errors import NoSuchModel, Refused, TimedOut

_DRAIN_POLL_S = 0.05


@dataclass(slots=True)
class ControlParts:
    """The parts of the control plane below the models."""

    settings: Settings
    registry: Registry
    history: History
    fleet: Fleet
    dispatcher: Dispatcher
    supervisor: WorkerSupervisor


async def uncut(work: Coroutine[None, None, None]) -> None:
    """Do all of ``work`` for a caller that ends with an error, also if cancelled meanwhile."""
    task = asyncio.create_task(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((task,))
    await task


class ModelPart:
    """A part that manages models, with the parts below by name."""

    def __init__(self, parts: ControlParts) -> None:
        self._settings = parts.settings
        self._registry = parts.registry
        self._history = parts.history
        self._fleet = parts.fleet
        self._dispatcher = parts.dispatcher
        self._supervisor = parts.supervisor

    async def find(self, name: str) -> ModelRow:
        """Return the model of this name or alias.

        Raises NoSuchModel: there is none; the registered names are in the hint.
        """
        row = await self._registry.get(name)
        if row is None:
            names = ", ".join(row.spec.name for row in await self._registry.list())
            raise NoSuchModel(f"no model is named {name!r}", f"registered: {names or 'none'}")
        return row

    def _check_idle(self, model: str) -> None:
        """Raise Refused if the model or adapter has live requests."""
        num_live = self._num_live(model)
        if num_live:
            raise Refused(
                f"{model} has {num_live} live requests", "use --drain to wait or --force to cancel"
            )

    async def _wait_idle(self, model: str) -> None:
        """Return when a model or adapter has no live requests.

        Raises TimedOut: requests are left after ``limits.drain_timeout``.
        """
        limit_s, loop = self._settings.limits.drain_timeout_s, asyncio.get_running_loop()
        deadline_s = loop.time() + limit_s
        while num_live := self._num_live(model):
            if loop.time() > deadline_s:
                raise TimedOut(
                    f"{model}: {num_live} requests still run after {limit_s:g} s",
                    "raise limits.drain_timeout or use --force",
                )
            await asyncio.sleep(_DRAIN_POLL_S)

    def _num_live(self, name: str) -> int:
        live = self._dispatcher.live
        return max(live.num_of(name), live.num_of_name(name))


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

    Raises Refused: ``name`` is a preset or adapter, and has no ``what`` of its own.
    """
    if spec.further_named(name) is not None:
        raise Refused(
            f"{name} is {kind_of(spec, name)} and has no {what} of its own",
            f"use the name {spec.name}, or remove {name} with `gpupool rm {name}`",
        )
