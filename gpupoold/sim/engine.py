"""A run of the simulator: requests through placement and devices, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from gpupoold.errors import UsageError
from gpupoold.scheduling.placement import Placement
from gpupoold.scheduling.policy import DevicePolicy
from gpupoold.sim.clock import EventQueue, Priority
from gpupoold.sim.device import DeviceTally, SimDevice, SimLive
from gpupoold.sim.metrics import RequestResult
from gpupoold.sim.model import SimModel
from gpupoold.sim.workloads import SimRequest


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to schedule a box: a placement, and a policy for each of its devices."""

    name: str
    placement: Callable[[], Placement]
    device: Callable[[], DevicePolicy]
    prefetches: bool = True
    # Requests that wait for a device go in this order; by default that of their arrival.
    rank: Callable[[SimRequest], float] = attrgetter("arrival_s")


@dataclass(frozen=True, slots=True)
class SimOutcome:
    """What became of every request, in order of arrival, and what each device did."""

    results: tuple[RequestResult, ...]
    devices: tuple[DeviceTally, ...]
    end_s: float


class Simulation:
    """One box of equal devices under one policy. The same arguments give the same outcome."""

    def __init__(
        self, models: Mapping[str, SimModel], policy: Policy, num_devices: int, device_bytes: int
    ) -> None:
        """Build the box.

        Raises:
            UsageError: no devices, or a model that no device can hold.
        """
        if num_devices < 1:
            raise UsageError(f"{num_devices} devices: at least one is needed")
        for model in models.values():
            if model.weight_bytes >= device_bytes:
                raise UsageError(
                    f"{model.name} weighs {model.weight_bytes / 1e9:.3g} GB, "
                    f"a device has {device_bytes / 1e9:.3g} GB"
                )
        self._models = models
        self._placement = policy.placement()
        self._rank = policy.rank
        self._queue: EventQueue[Callable[[], None]] = EventQueue()
        self._held: list[SimLive] = []
        self._devices = [
            SimDevice(
                number,
                models,
                policy.device(),
                device_bytes,
                self._queue,
                lambda _number, _live: self._retry(),
                prefetches=policy.prefetches,
            )
            for number in range(num_devices)
        ]

    def run(self, requests: Sequence[SimRequest], end_s: float) -> SimOutcome:
        """Serve until ``end_s``; what is not done by then counts as late or never produced.

        Raises:
            UsageError: a request for a model that the box does not have.
        """
        lives = [SimLive(request) for request in requests]
        for live in lives:
            if live.request.model not in self._models:
                raise UsageError(f"the workload asks for {live.request.model}, which is not there")
            self._arrive_later(live)
        while (at_s := self._queue.next_at_s) is not None and at_s <= end_s:
            due = self._queue.pop()
            assert due is not None
            due.event()
        for device in self._devices:
            device.flush(end_s)
        results = tuple(
            RequestResult(
                live.request,
                self._models[live.request.model].targets,
                tuple(at for at in live.token_times_s if at <= end_s),
            )
            for live in lives
        )
        return SimOutcome(results, tuple(device.tally for device in self._devices), end_s)

    def _arrive_later(self, live: SimLive) -> None:
        self._queue.schedule(
            live.request.arrival_s, lambda: self._place([live]), priority=Priority.ARRIVAL
        )

    def _place(self, lives: Sequence[SimLive]) -> None:
        """Give each request to a device; those that get none are held back."""
        views = [device.view() for device in self._devices]
        for live in lives:
            number = self._placement.choose(live.request.model, views)
            if number is None:
                self._held.append(live)
            else:
                self._devices[number].add(live)
                views[number] = self._devices[number].view()

    def _retry(self) -> None:
        """A request ended: those held back are tried again, in order of arrival."""
        if self._held:
            self._queue.schedule(self._queue.now_s, self._place_held, priority=Priority.DECISION)

    def _place_held(self) -> None:
        held = sorted(self._held, key=lambda live: self._rank(live.request))
        self._held.clear()
        self._place(held)
