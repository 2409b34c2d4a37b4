"""An operator's actions on workers: roles, and draining."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from gpupoold.config.sections import LimitSettings
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import Role
from gpupoold.errors import TimedOut, no_such_device

_DRAIN_POLL_S = 0.02


class WorkerOperations:
    """Role changes and drains by an operator; :mod:`gpupoold.control.workers.roles` stores them."""

    def __init__(
        self, limits: LimitSettings, dispatcher: Dispatcher, workers: Sequence[Worker]
    ) -> None:
        self.limits = limits
        self._dispatcher = dispatcher
        self._workers = workers

    def set_role(self, number: int, role: Role | None) -> None:
        """Set a worker's role; None leaves the choice to the policy."""
        self._dispatcher.set_role(self.worker(number).number, role)

    async def drain(self, number: int) -> None:
        """Drain a worker: return when no requests are left; ``undrain`` ends the state.

        Raises:
            UsageError: there is no such worker.
            TimedOut: requests were left after ``limits.drain_timeout``; the drain continues.
        """
        self._dispatcher.set_draining(self.worker(number).number, is_draining=True)
        limit_s = self.limits.drain_timeout_s
        deadline_s = time.monotonic() + limit_s
        while num_left := self._dispatcher.nums_of_requests([number])[0]:
            if time.monotonic() > deadline_s:
                raise TimedOut(
                    f"worker {number} still has {num_left} requests after {limit_s:g} s",
                    "the requests continue there; see `gpupool ps`, or run `gpupool drain` again",
                )
            await asyncio.sleep(_DRAIN_POLL_S)

    def undrain(self, number: int) -> None:
        """End the drain of a worker."""
        self._dispatcher.set_draining(self.worker(number).number, is_draining=False)

    def worker(self, number: int) -> Worker:
        """Return a worker."""
        workers = self._workers
        if not 0 <= number < len(workers):
            raise no_such_device(number, len(workers))
        return workers[number]
