"""Quarantine of models that crash workers or cannot be loaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime

from gpupool_state import History, Registry
from gpupoold.control.models.circuit_breaker import CircuitBreakers
from gpupoold.control.models.loader import ModelLoader
from gpupoold.control.models.warming import Warmer
from gpupoold.control.processes.crash_attribution import Candidates, Death, candidates_of
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.worker import WorkerEnded
from gpupoold.domain import ModelState
from gpupoold.errors import GpupoolError, Unavailable

_logger = logging.getLogger(__name__)

_UNKNOWN = Death("a crash that was unclear at first", is_at_fault=True)


class Quarantine:
    """Attributes crashes, unloads models with an open breaker, and retries after the wait."""

    def __init__(
        self,
        breakers: CircuitBreakers,
        registry: Registry,
        history: History,
        dispatcher: Dispatcher,
        loader: ModelLoader,
        warmer: Warmer,
        publish: Callable[[], Awaitable[None]],
        try_again: Callable[[str], Awaitable[None]],
    ) -> None:
        """``try_again`` loads a model on one worker, which calls ``works``, then on other
        workers.

        ``try_again`` raises GpupoolError.
        """
        self._breakers = breakers
        self._registry = registry
        self._history = history
        self._dispatcher = dispatcher
        self._loader = loader
        self._warmer = warmer
        self._publish = publish
        self._try_again = try_again
        self._unclear: dict[str, tuple[int, Death]] = {}  # the last crash of each model
        self._tasks: set[asyncio.Task[None]] = set()

    def crashed(self, device: int, death: Death) -> Candidates:
        """Record a worker's death and its activity; return the possible culprits."""
        lost = self._dispatcher.live.on_device(device)
        candidates = candidates_of(death, {one.request_id: one.model for one in lost})
        text = f"ended ({death.reason}), it is restarted"
        if death.doing:
            text += f"; it was in {death.doing}"
        self._history.record_event("error", "worker_down", str(device), text)
        if candidates.only_model is not None:
            self._charge(candidates.only_model, device, death)
        else:
            self._unclear |= dict.fromkeys(candidates.models, (device, death))
        return candidates

    def convicted(self, model: str, request_id: str) -> None:
        reason = self._breakers.record_convicted(model, request_id, time.monotonic())
        if reason is not None:
            self._shut_out(model, reason)

    def answered(self, model: str) -> None:
        self._breakers.answered(model)

    def left_over(self, model: str) -> None:
        self._charge(model, *self._unclear.pop(model, (0, _UNKNOWN)))

    async def failed(self, model: str, reason: str) -> None:
        """Record that no worker could load a model; a retry follows."""
        if self._breakers.retry_at_s(model) is None:
            self._breakers.open(model, reason, time.monotonic(), is_blocking=False)
        await self._set_failed(model, reason)

    def works(self, model: str) -> None:
        """Record that a model is loaded and ready."""
        if self._breakers.close(model, time.monotonic()):
            self._history.record_event("info", "model_recovered", model, "loaded, and ready again")

    def look(self, now_s: float) -> None:
        """Retry the models whose wait is over; to be called every second."""
        for model in self._breakers.due(now_s):
            self._breakers.half_open(model)
            self._begin(self._retry(model))

    async def stop(self) -> None:
        """Abandon work in progress; the workers have stopped before."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _charge(self, model: str, device: int, death: Death) -> None:
        reason = self._breakers.record_crash(model, device, death, time.monotonic())
        if reason is not None:
            self._shut_out(model, reason)

    def _shut_out(self, model: str, reason: str) -> None:
        """End the model's requests, and take the model off all workers."""
        text = self._with_time(model, reason)
        self._history.record_event("error", "model_quarantined", model, text)
        self._dispatcher.accounts.meters.model(model).quarantines += 1
        self._dispatcher.fail_model(model, f"{model} is in quarantine: it {reason}")
        self._dispatcher.forget(model)
        self._begin(self._take_off(model, reason))

    async def _take_off(self, model: str, reason: str) -> None:
        try:
            await self._set_failed(model, reason)
            await self._publish()
            await self._warmer.cancel(model)
            await self._loader.withdraw(model)
        except GpupoolError as error:
            _logger.error("%s could not be taken off all workers: %s", model, error)

    async def _retry(self, model: str) -> None:
        now_s = time.monotonic()
        try:
            await self._try_again(model)
            self._breakers.postpone(model, now_s)  # unless it works: it is being removed
        except (WorkerEnded, Unavailable) as error:
            # Either a crash has been recorded, which has opened the breaker, or nothing is known.
            self._breakers.postpone(model, time.monotonic())
            _logger.warning("%s could not be tried again: %s", model, error)
        except GpupoolError as error:
            self._breakers.open(model, str(error), now_s, is_blocking=False)
            self._history.record_event("error", "model_failed", model, str(error))
            await self._set_failed(model, str(error))
        await self._publish()

    async def _set_failed(self, model: str, reason: str) -> None:
        if await self._registry.get(model) is not None:
            text = self._with_time(model, reason)
            await self._registry.set_state(model, ModelState.FAILED, text)

    def _with_time(self, model: str, reason: str) -> str:
        retry_at_s = self._breakers.retry_at_s(model)
        if retry_at_s is None:
            return reason
        at = datetime.fromtimestamp(time.time() + retry_at_s - time.monotonic()).astimezone()
        return f"{reason}; it is tried again at {at:%H:%M:%S}"

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
