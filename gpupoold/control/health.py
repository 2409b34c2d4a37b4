"""Progress of the control plane, and a summary in one line."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.workers import WorkerSupervisor

# A round of checks is due every second; a busy machine may delay some.
_ROUND_TIMEOUT_S = 10.0
# The rounds also end requests without tokens; this is the time allowed for a late round.
_OVERDUE_S = 30.0


class Health:
    """Records each round of the periodic checks."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        supervisor: WorkerSupervisor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._round_s = clock()

    def check(self, now_s: float) -> None:
        """Record a round; to be called at its end."""
        self._round_s = now_s

    def failure_reason(self, now_s: float) -> str:
        """Return why the control plane makes no progress, empty without a problem.

        A hung worker is no reason here: the watchdog ends hung workers.
        """
        late_s = now_s - self._round_s
        if late_s > _ROUND_TIMEOUT_S:
            return f"workers and requests have not been checked for {late_s:.0f} s"
        limit_s = self._dispatcher.token_timeout_s + _OVERDUE_S
        stuck = self._dispatcher.live.silent_since(now_s - limit_s)
        if stuck:
            first = stuck[0]
            return f"{first.request_id} of {first.model} has waited too long for a token"
        return ""

    def summary(self) -> str:
        """Devices, models and requests, for ``systemctl status``."""
        workers = self._supervisor.workers
        num_ready = sum(worker.is_ready for worker in workers)
        return (
            f"{num_ready} of {len(workers)} devices ready, "
            f"{self._fleet.num_served()} models served, {len(self._dispatcher.live)} live requests"
        )
