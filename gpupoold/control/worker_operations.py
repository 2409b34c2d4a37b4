"""What an operator does to instances: roles, and taking one out of service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from gpupoold.config.schema import LimitSettings
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.worker import Instance
from gpupoold.domain import Role
from gpupoold.errors import TimedOut, UsageError

_DRAIN_POLL_S = 0.02


class InstanceControl:
    """Role changes and drains by an operator; :mod:`gpupoold.control.workers.roles` keeps them."""

    def __init__(
        self, limits: LimitSettings, dispatcher: Dispatcher, instances: Sequence[Instance]
    ) -> None:
        self.limits = limits
        self._dispatcher = dispatcher
        self._instances = instances

    def set_role(self, number: int, role: Role | None) -> None:
        """Give an instance a role; None: the policy's to choose.

        Raises:
            UsageError: there is no such instance.
        """
        self._dispatcher.set_role(self._instance(number).number, role)

    async def drain(self, number: int) -> None:
        """Return when an instance has no requests; it gets nothing until ``undrain``.

        Raises:
            UsageError: there is no such instance.
            TimedOut: some were still there after ``limits.drain_timeout``; it goes on draining.
        """
        self._dispatcher.set_draining(self._instance(number).number, is_draining=True)
        limit_s = self.limits.drain_timeout_s
        deadline_s = time.monotonic() + limit_s
        while num_left := self._dispatcher.nums_of_requests([number])[0]:
            if time.monotonic() > deadline_s:
                raise TimedOut(
                    f"instance {number} still has {num_left} requests after {limit_s:g} s",
                    "they end there; see `gpupool ps`, or wait with `gpupool drain` again",
                )
            await asyncio.sleep(_DRAIN_POLL_S)

    def undrain(self, number: int) -> None:
        """Let an instance have work again.

        Raises:
            UsageError: there is no such instance.
        """
        self._dispatcher.set_draining(self._instance(number).number, is_draining=False)

    def _instance(self, number: int) -> Instance:
        instances = self._instances
        if not 0 <= number < len(instances):
            last = len(instances) - 1
            raise UsageError(f"there is no instance {number}", f"there are 0 to {last}")
        return instances[number]
