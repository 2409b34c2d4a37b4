"""Quarantine of models that crash workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from gpupool_state import History
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.models.failures import Failures
from gpupoold.control.models.loader import ModelLoader
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.warming import Warmer
from gpupoold.control.processes.crash_attribution import Candidates, Death, candidates_of
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.worker import Worker
from gpupoold.errors import GpupoolError

_logger = logging.getLogger(__name__)

_UNKNOWN = Death("an earlier crash without a clear cause", is_at_fault=True)


class Quarantine:
    """Attributes crashes to models, and takes a model with an open breaker off the workers.

    ``clock`` returns seconds of the monotonic clock.
    """

    def __init__(
        self,
        history: History,
        fleet: Fleet,
        dispatcher: Dispatcher,
        loader: ModelLoader,
        warmer: Warmer,
        failures: Failures,
        mounts: ModelMounts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history = history
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._loader = loader
        self._warmer = warmer
        self._failures = failures
        self._mounts = mounts
        self._clock = clock
        self._unclear: dict[str, tuple[int, Death]] = {}  # the latest crash of each model
        self._tasks: set[asyncio.Task[None]] = set()

    def crashed(self, device: int, death: Death) -> Candidates:
        """Record the death and the activity of a worker; return the possible causes."""
        lost = self._dispatcher.live.on_device(device)
        candidates = candidates_of(death, {one.request_id: one.model for one in lost})
        text = f"ended ({death.reason}) and is restarted"
        if death.doing:
            text += f"; activity: {death.doing}"
        self._history.record_event("error", "worker_down", str(device), text)
        if candidates.only_model is not None:
            self._record_crash(candidates.only_model, device, death)
        else:
            self._unclear |= dict.fromkeys(candidates.models, (device, death))
        return candidates

    async def worker_down(self, worker: Worker, death: Death) -> None:
        """Attribute the end of a worker, and requeue the requests there."""
        candidates = self.crashed(worker.number, death)
        reason = f"the worker of device {worker.number} ended: {death.reason}"
        self._dispatcher.worker_down(worker, reason, candidates)
        if death.is_at_fault and not worker.has_come_up:  # the worker may never become ready
            self._dispatcher.fail_unhosted(f"{reason}, before the worker was ready")
        await self._mounts.publish()

    async def stop(self) -> None:
        """Abandon work in progress; the workers have stopped before."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def convicted(self, model: str, request_id: str) -> None:
        reason = self._fleet.breakers.record_convicted(model, request_id, self._clock())
        if reason is not None:
            self._shut_out(model, reason)

    def acquitted(self, model: str) -> None:
        self._record_crash(model, *self._unclear.pop(model, (0, _UNKNOWN)))

    def _record_crash(self, model: str, device: int, death: Death) -> None:
        reason = self._fleet.breakers.record_crash(model, device, death, self._clock())
        if reason is not None:
            self._shut_out(model, reason)

    def _shut_out(self, model: str, reason: str) -> None:
        """End the model's requests, and take the model off all workers."""
        text = self._failures.with_time(model, reason)
        self._history.record_event("error", "model_quarantined", model, text)
        self._dispatcher.accounts.meters.model(model).quarantines += 1
        self._dispatcher.fail_model(model, f"{model} is in quarantine, because the model {reason}")
        self._fleet.fail(model, text)
        self._dispatcher.forget(model)
        task = asyncio.create_task(self._take_off(model, reason))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take_off(self, model: str, reason: str) -> None:
        try:
            await self._failures.record(model, reason)
            await self._warmer.cancel(model)
            await self._loader.withdraw(model)
        except GpupoolError as error:
            _logger.error("%s could not be taken off all workers: %s", model, error)
