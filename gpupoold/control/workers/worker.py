"""A worker as the daemon sees it."""

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
    """One worker, and the answers that it owes.

    ``models`` are those it was told to load, ``layouts`` the digests of those that it has
    loaded, ``snapshots`` those whose snapshot it has.
    """

    number: int
    device: DeviceSettings
    state: str = "starting"
    has_come_up: bool = False
    """Whether the process that runs, or ran last, has been ready."""
    num_restarts: int = 0
    """Processes that have ended and were, or are going to be, replaced."""
    child: Child[m.FromWorker] | None = None
    ready: m.WorkerReady | None = None
    status: m.WorkerStatus | None = None
    reading: Reading = NO_READING
    """What the driver last said of its GPU."""
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
    """Why the daemon has killed the process that runs, if it has."""
    snapshot_fds: dict[str, int] = field(default_factory=dict)
    kv_host_fd: int | None = None
    """Of its KV host cache, for the others."""

    @property
    def is_ready(self) -> bool:
        """True if it can load and serve."""
        return self.state == "ready"

    @property
    def is_excused(self) -> bool:
        """True if it does what takes long and has a limit of its own."""
        return self.loading.oldest is not None or self.calls.oldest is not None

    @property
    def resident(self) -> frozenset[str]:
        """Models all of whose weights were on the device when it last reported."""
        models = self.status.models if self.status else []
        return frozenset(
            held.model for held in models if held.weights_resident_bytes == held.weights_total_bytes
        )

    def take_fd(self) -> int:
        """The descriptor that came with the message just received; the caller owns it."""
        assert self.child is not None
        return self.child.channel.take_fd()

    def send(self, message: m.Message, fds: tuple[int, ...] = ()) -> None:
        """Send, or do nothing when it is down: its end is handled elsewhere."""
        if self.child is not None and not self.child.channel.closed:
            self.child.channel.send(message, fds)
