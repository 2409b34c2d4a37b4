"""What all operations on models use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass

from gpupool_state import History, Registry
from gpupoold.config.schema import Settings
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.errors import Refused, TimedOut

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

    def _check_idle(self, model: str) -> None:
        """Raise Refused if the model or adapter has live requests."""
        num_live = self._num_live(model)
        if num_live:
            raise Refused(
                f"{model} has {num_live} live requests", "use --drain to wait or --force to cancel"
            )

    async def _wait_idle(self, model: str) -> None:
        """Return when a model or adapter has no live requests.

        Raises:
            TimedOut: requests are left after ``limits.drain_timeout``.
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
