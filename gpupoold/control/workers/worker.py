"""The daemon's record of a worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gpupoold.config.sections import DeviceSettings
from gpupoold.control.processes.supervised import Calls, Pending, Supervised
from gpupoold.errors import Failed
from gpupoold.system.nvml import NO_READING, Reading
from gpupoold.wire import messages as m


class WorkerEnded(Failed):
    """The worker ended before answering."""


class WorkerIsDown(WorkerEnded):
    """The worker was down before the order, and so did not end because of the order."""


@dataclass(eq=False, slots=True)
class Worker:
    """A worker and its awaited answers.

    ``process`` is None before the start.
    """

    number: int
    device: DeviceSettings
    state: str = "starting"
    has_come_up: bool = False
    """True if the present or last process has been ready."""
    has_loaded: bool = False
    """True if the present or last process has loaded the models of its start."""
    load_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a load: a worker has one load at a time."""
    num_loads: int = 0
    """Number of loads that run or wait for ``load_lock``."""
    process: Supervised[m.FromWorker] | None = None
    ready: m.WorkerReady | None = None
    status: m.WorkerStatus | None = None
    reading: Reading = NO_READING
    """The driver's latest readings of the GPU."""
    loading: Pending[str, m.ModelLoaded] = field(default_factory=Pending)
    unloading: Pending[str, None] = field(default_factory=Pending)
    taking: Pending[str, str] = field(default_factory=Pending)
    dropping: Pending[str, None] = field(default_factory=Pending)
    calls: Calls[object] = field(default_factory=Calls)
    snapshot_fds: dict[str, int] = field(default_factory=dict)
    kv_host_fd: int | None = None
    """Descriptor of the KV host cache of the latest process that came up, for other workers and for
    the next process."""

    @property
    def is_ready(self) -> bool:
        """True if the worker can load and serve models."""
        return self.state == "ready"

    @property
    def pid(self) -> int | None:
        """The process id; None while no process runs."""
        return None if self.process is None else self.process.pid

    @property
    def num_restarts(self) -> int:
        """Number of processes that ended and were or will be replaced."""
        return 0 if self.process is None else self.process.num_restarts

    @property
    def resident(self) -> frozenset[str]:
        """Models whose weights were completely on the device at the latest report."""
        models = self.status.models if self.status else []
        return frozenset(
            held.model for held in models if held.weights_resident_bytes == held.weights_total_bytes
        )

    def take_fd(self) -> int:
        """Return the descriptor of the latest message, owned by the caller."""
        assert self.process is not None
        return self.process.take_fd()

    def send(self, message: m.Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message, unless the worker is down."""
        if self.process is not None:
            self.process.send(message, fds)
