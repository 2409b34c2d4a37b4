"""Parked devices: idle devices that have given their memory back until a request comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from gpupoold.control.models.additions import OngoingAdditions
from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.control.workers.worker import Worker
from gpupoold.errors import Refused
from gpupoold.scheduling.policies.planned_turns import Tuning, load_of
from gpupoold.units import format_duration

_logger = logging.getLogger(__name__)
# Requests that have waited this long for a device wake another device.
_WAIT_S = 1.0


class Parking(ModelPart):
    """Parks and wakes devices, by hand and after ``idle.park_after``.

    A parked device has given its memory and its context back; the weights stay in the model cache.
    Its models count as evicted, so a request of such a model loads the model again: on another
    device that has memory, else on a device that is woken. While requests wait although every
    device in service is full, further devices are woken. While a model is being added, idle devices
    stay, since a device that was large enough in a check must be there for the load.
    """

    def __init__(self, parts: ControlParts, additions: OngoingAdditions) -> None:
        super().__init__(parts)
        self._additions = additions
        self._idle_since_s: dict[int, float] = {}
        self._had: dict[str, int] = {}  # the device that a model had before its device was parked
        self._parking: asyncio.Task[None] | None = None

    def check(self, now_s: float) -> None:
        """Park devices that are idle for too long, and wake devices; to be called every second."""
        limit_s = self._settings.idle.park_after_s
        is_parking = self._parking is not None and not self._parking.done()
        if limit_s and not is_parking:
            idle = [] if self._additions.are_under_way else self._idle(self._supervisor.workers)
            self._idle_since_s = since_s = {
                worker.number: self._idle_since_s.get(worker.number, now_s) for worker in idle
            }
            due = [number for number, at_s in since_s.items() if now_s - at_s >= limit_s]
            if due:
                self._parking = asyncio.create_task(self._park_idle(due[0]), name="park")
        self._wake_for_waiting(now_s)

    async def park(self, number: int, why: str = "by hand") -> None:
        """Park a device without requests; no effect on a parked device.

        Raises:
            UsageError: there is no such device.
            Refused: the device has requests, is loading, or is not ready.
        """
        worker = self._worker(number)
        if worker.state == "parked":
            return
        async with worker.load_lock:
            if not self._idle([worker]):
                raise Refused(
                    f"device {number} is {worker.state}, and has requests or a load",
                    f"wait for their end, or run `gpupool drain {number}` before",
                )
            for name in self._fleet.hosts.engines_on(number):
                self._had[name] = number
                self._dispatcher.evict(name, worker)
            self._dispatcher.worker_down(worker, "parked")
        await self._supervisor.park(number)
        self._history.record_event("info", "device_parked", str(number), why)

    def wake(self, number: int, why: str = "by hand") -> None:
        """Wake a parked device; no effect on others. Raises UsageError: there is no such device."""
        if self._worker(number).state == "parked":
            self._supervisor.wake(number)
            self._history.record_event("info", "device_woken", str(number), why)

    async def stop(self) -> None:
        """Abandon a device that is about to be parked."""
        if self._parking is not None:
            self._parking.cancel()
            await asyncio.gather(self._parking, return_exceptions=True)

    async def _park_idle(self, number: int) -> None:
        after = format_duration(self._settings.idle.park_after_s)
        try:
            await self.park(number, f"no requests for {after}")
        except Refused as error:
            _logger.info("device %d stays: %s", number, error)
        self._idle_since_s.pop(number, None)

    def _idle(self, workers: Sequence[Worker]) -> list[Worker]:
        """Return the ready workers without requests and loads, present or coming."""
        ready = [each for each in workers if each.is_ready and each.has_loaded]
        nums = self._dispatcher.nums_of_requests([worker.number for worker in ready])
        waiting = {each.model for each in self._dispatcher.live.all() if each.device is None}
        return [
            worker
            for worker, num in zip(ready, nums, strict=True)
            if not (num or worker.num_loads)
            and waiting.isdisjoint(self._fleet.hosts.engines_on(worker.number))
        ]

    def wanted(self, model: str) -> None:
        """Wake a device for a model that no device in service can load."""
        parked = self._parked()
        states = {worker.state for worker in self._supervisor.workers}
        if not parked or not states.isdisjoint(("ready", "starting")):
            return  # the load goes to another device, or waits, see _wake_for_waiting()
        self.wake(self._best(model, parked), f"for a request of {model}")

    def _wake_for_waiting(self, now_s: float) -> None:
        """Wake a device for a model that has none and is not loaded, or while all are full."""
        parked = self._parked()
        if not parked or any(worker.state == "starting" for worker in self._supervisor.workers):
            return
        are_loading = any(worker.num_loads for worker in self._supervisor.workers)
        for request in () if are_loading else self._dispatcher.live.all():
            waits = request.device is None and now_s - request.arrival_s > _WAIT_S
            is_nowhere = not self._fleet.availability(request.model).devices
            if waits and is_nowhere and not request.is_background:
                self.wake(self._best(request.model, parked), f"for a request of {request.model}")
                return
        full_load = Tuning().full_load
        devices = self._dispatcher.state.devices.values()
        if devices and all(load_of(device) > full_load for device in devices):
            self.wake(parked[0], "all other devices are full")

    def _best(self, model: str, parked: Sequence[int]) -> int:
        fixed = [number for number in parked if number in self._fleet.fixed_devices(model)]
        had = self._had.get(model)
        return had if had is not None and had in (fixed or parked) else (fixed or parked)[0]

    def _parked(self) -> list[int]:
        return [worker.number for worker in self._supervisor.workers if worker.state == "parked"]

    def _worker(self, number: int) -> Worker:
        self._supervisor.check_devices([number])
        return self._supervisor.workers[number]
