"""The interface of scheduling policies, which read the core's state and keep their own queues."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from gpupoold.domain import Role
from gpupoold.scheduling.events import Turn
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import DeviceState, PlannedHome, Request, State


class CannotServe(Exception):
    """The policy cannot serve all present models; the message names the model and the reason."""


class Choice(NamedTuple):
    """The next turn of a device, see :class:`Turn`, and the rule that chose the turn."""

    model: str
    quota_s: float
    chunk_tokens: int | None = None
    rule: Rule | None = None


class Placement(NamedTuple):
    """The device of a request, and the rule that chose the device."""

    request: Request
    device: DeviceState
    rule: Rule | None = None


class InLine(NamedTuple):
    """A model waiting for a turn on a device, and the rule that chose the model's place.

    ``duration_s`` is the present length of the turn, None if the policy gives none.
    """

    model: str
    rule: Rule
    duration_s: float | None = None


class Policy(ABC):
    """Pure decisions, called by the core in the order of events; the defaults have no rules.

    ``assign`` may reassign held and queued requests; ``send`` returns the requests to send to a
    device. Both are called after every batch of events that could change the result. Requests
    waiting for KV memory are not in ``queued``: only ``assign`` sees them until the device admits
    them. See :func:`waiting_for_kv`.
    """

    name: str

    def check(self, state: State) -> None:
        """Raise :class:`CannotServe` if the state's devices cannot serve all its models."""
        return

    def set_quota_max(self, quota_max_s: float) -> None:
        """Set the longest turn, for turns planned from now on; ignored by turns without a quota."""
        return

    def arrived(self, request: Request, state: State) -> None:
        """Handle a request that arrived or lost its device; the request is held."""
        return

    def ended(self, request: Request, state: State) -> None:
        """Handle the end of a request, which is in no batch any more."""
        return

    @abstractmethod
    def assign(self, state: State, now_s: float) -> Iterable[Placement]:
        """Return the devices of requests."""

    def send(self, device: DeviceState, state: State, now_s: float) -> Iterable[Request]:
        """Return the queued requests to send to the device now: all."""
        return device.queued_requests()

    def first_token(self, request: Request, state: State, now_s: float) -> DeviceState | None:
        """Return the device to decode a prefilled request, None to stay.

        Called at the first token, and repeatedly while its device migrates answers away. The
        request stays on the device of the prefill, unless that device migrates answers away; then
        the device with the fewest requests decodes.
        """
        assert request.device is not None
        if not state.devices[request.device].migrates_out:
            return None
        others = [host for host in state.decode_hosts(request.model) if not host.migrates_out]
        return fewest_requests(others) if others else None

    def roles(self, state: State, now_s: float) -> Iterable[tuple[DeviceState, Role]]:
        """Return new roles for devices without a fixed role, here none; called at every tick."""
        return ()

    def homes(self, state: State, now_s: float) -> Mapping[str, PlannedHome | None]:
        """Return changed planned homes by model, here none; called at every tick."""
        return {}

    def rebalance(self, state: State, now_s: float) -> Iterable[tuple[Request, DeviceState]]:
        """Return migrations of running answers that improve the balance, here none; called at
        every tick.
        """
        return ()

    @abstractmethod
    def next_turn(self, device: DeviceState, state: State, now_s: float) -> Choice | None:
        """Return the next turn on an idle device, None without work."""

    @abstractmethod
    def upcoming(self, device: DeviceState, state: State, now_s: float) -> str | None:
        """Return the likely model of the next turn, None while no other model waits."""

    def revise(self, turn: Turn, device: DeviceState, state: State, now_s: float) -> Turn:
        """Return the present turn, possibly with another quota or other ``chunk_tokens``.

        The quota counts from the turn's start.
        """
        return turn

    def line(self, device: DeviceState, state: State, now_s: float) -> list[InLine]:
        """Return the queue behind the present turn, by the rules of ``upcoming``.

        For explanations: changes nothing. The default has the other models with requests, without
        times: whole answers are served.
        """
        on_turn = device.turn.model if device.turn else None
        names = dict.fromkeys([*device.working, *device.queued])
        return [InLine(name, Rule.UNTIL_DONE) for name in names if name != on_turn]


def waiting_for_kv(state: State) -> Iterator[tuple[Request, list[DeviceState]]]:
    """Yield the first request of each queue for KV memory, with devices without a queue.

    The devices host the request's model. If the caller moves the request at once, the next request
    of the queue follows.
    """
    without_line = [device for device in state.devices.values() if not device.waiting_for_kv]
    if len(without_line) in (0, len(state.devices)):
        return
    for device in state.devices.values():
        for name in list(device.waiting_for_kv):
            hosts = state.prefill_hosts(state.models[name])
            others = [host for host in hosts if not (host.waiting_for_kv or host.is_draining)]
            while others and (line := device.waiting_for_kv.get(name)) is not None:
                request = next(iter(line.requests.values()))
                yield request, others
                if request.device == device.number:
                    break


def fewest_requests(devices: Iterable[DeviceState]) -> DeviceState:
    """Return the device with the fewest requests, the first among equals; there must be one."""
    return min(devices, key=lambda device: (device.num_requests, device.number))
