"""A worker from the daemon's side."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gpupoold.config.schema import DeviceSettings
from gpupoold.control.processes.child import Child
from gpupoold.control.processes.pending import Pending
from gpupoold.control.processes.watchdog import Watch
from gpupoold.control.workers.nvml import NO_READING, Reading
from gpupoold.wire import messages as m


@dataclass(eq=False, slots=True)
class Worker:
    """A worker and its awaited answers.

    ``models`` are the models ordered to load, ``layouts`` the digests of loaded models,
    ``snapshots`` the models with an attached snapshot.
    """

    number: int
    device: DeviceSettings
    state: str = "starting"
    has_come_up: bool = False
    """True if the present or last process has been ready."""
    num_restarts: int = 0
    """Number of processes that ended and were or will be replaced."""
    child: Child[m.FromWorker] | None = None
    ready: m.WorkerReady | None = None
    status: m.WorkerStatus | None = None
    reading: Reading = NO_READING
    """The driver's latest readings of the GPU."""
    models: set[str] = field(default_factory=set)
    layouts: dict[str, str] = field(default_factory=dict)
    snapshots: set[str] = field(default_factory=set)
    loading: Pending[str, m.ModelLoaded] = field(default_factory=Pending)
    unloading: Pending[str, None] = field(default_factory=Pending)
    taking: Pending[str, str] = field(default_factory=Pending)
    dropping: Pending[str, None] = field(default_factory=Pending)
    calls: Pending[int, object] = field(default_factory=Pending)
    coming_up: asyncio.Future[None] | None = None
    watch: Watch | None = None
    ended_for: str = ""
    """The daemon's reason for killing the present process, or empty."""
    snapshot_fds: dict[str, int] = field(default_factory=dict)
    kv_host_fd: int | None = None
    """Descriptor of the KV host cache, for other workers."""

    @property
    def is_ready(self) -> bool:
        """True if the worker can load and serve models."""
        return self.state == "ready"

    @property
    def is_excused(self) -> bool:
        """True during work with a time limit of its own."""
        return self.loading.oldest is not None or self.calls.oldest is not None

    @property
    def resident(self) -> frozenset[str]:
        """Models whose weights were completely on the device at the latest report."""
        models = self.status.models if self.status else []
        return frozenset(
            held.model for held in models if held.weights_resident_bytes == held.weights_total_bytes
        )

    def take_fd(self) -> int:
        """Return the descriptor of the latest message, owned by the caller."""
        assert self.child is not None
        return self.child.channel.take_fd()

    def send(self, message: m.Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message, unless the worker is down."""
        if self.child is not None and not self.child.channel.closed:
            self.child.channel.send(message, fds)
