"""Models that cannot serve: no worker could load the model, or none may load the model.

Crashes of workers are attributed to models here. A model with an open circuit breaker is in
quarantine: the controller takes the model off the workers.
"""

from __future__ import annotations

import time
from datetime import datetime

from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.control.processes.crash_attribution import Candidates, Death, candidates_of
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import ModelState
from gpupoold.errors import GpupoolError

_UNKNOWN = Death("an earlier crash without a clear cause", is_at_fault=True)


class Failures(ModelPart):
    """Records failures of models and crashes of workers, and the times of the next tries."""

    def __init__(self, parts: ControlParts) -> None:
        super().__init__(parts)
        self._unclear: dict[str, tuple[int, Death]] = {}  # the latest crash of each model

    async def not_loaded(self, model: str, error: GpupoolError) -> None:
        """Record that a worker could not load a model; without another worker the model has
        failed.
        """
        if not self._fleet.knows(model):
            return  # removed meanwhile
        self._history.record_event("error", "model_failed", model, str(error))
        if self._fleet.availability(model).devices:
            return
        self._dispatcher.fail_model(model, f"{model} could not be loaded: {error}")
        if self._fleet.breakers.retry_at_s(model) is None:
            self._fleet.breakers.open(model, str(error), time.monotonic(), is_blocking=False)
        await self.record(model, str(error))

    async def failed_again(self, model: str, error: GpupoolError, began_s: float) -> None:
        """Record that a retry, which began at ``began_s``, has failed: the next wait is longer."""
        self._fleet.breakers.open(model, str(error), began_s, is_blocking=False)
        self._history.record_event("error", "model_failed", model, str(error))
        await self.record(model, str(error))

    async def record(self, model: str, reason: str) -> None:
        """Record that a model cannot serve, with the reason."""
        text = self._with_time(model, reason)
        self._fleet.fail(model, text)
        if await self._registry.get(model) is not None:
            await self._registry.set_state(model, ModelState.FAILED, text)

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

    def worker_down(self, worker: Worker, death: Death) -> None:
        """Attribute the end of a worker, and requeue the requests there."""
        candidates = self.crashed(worker.number, death)
        reason = f"the worker of device {worker.number} ended: {death.reason}"
        self._dispatcher.worker_down(worker, reason, candidates)
        if death.is_at_fault and not worker.has_come_up:  # the worker may never become ready
            self._dispatcher.fail_unhosted(f"{reason}, before the worker was ready")

    def convicted(self, model: str, request_id: str) -> None:
        reason = self._fleet.breakers.record_convicted(model, request_id, time.monotonic())
        if reason is not None:
            self._shut_out(model, reason)

    def acquitted(self, model: str) -> None:
        self._record_crash(model, *self._unclear.pop(model, (0, _UNKNOWN)))

    def _record_crash(self, model: str, device: int, death: Death) -> None:
        reason = self._fleet.breakers.record_crash(model, device, death, time.monotonic())
        if reason is not None:
            self._shut_out(model, reason)

    def _shut_out(self, model: str, reason: str) -> None:
        """End the model's requests; the controller takes the model off all workers."""
        text = self._with_time(model, reason)
        self._history.record_event("error", "model_quarantined", model, text)
        self._dispatcher.accounts.meters.model(model).quarantines += 1
        self._dispatcher.fail_model(model, f"{model} is in quarantine, because the model {reason}")
        self._fleet.fail(model, text)
        self._dispatcher.forget(model)

    def _with_time(self, model: str, reason: str) -> str:
        """Return the reason together with the time of the next try."""
        retry_at_s = self._fleet.breakers.retry_at_s(model)
        if retry_at_s is None:
            return reason
        at = datetime.fromtimestamp(time.time() + retry_at_s - time.monotonic()).astimezone()
        return f"{reason}; next try at {at:%H:%M:%S}"
