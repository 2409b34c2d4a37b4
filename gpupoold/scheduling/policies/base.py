"""What a scheduling policy decides. It reads the core's state and keeps queues of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from gpupoold.domain import Role
from gpupoold.scheduling.actions import Turn
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import Batch, DeviceState, Request, State


class CannotServe(Exception):
    """The policy cannot serve all the models there are; the message says which and why."""


class Choice(NamedTuple):
    """The next turn of a device, see :class:`Turn`, and the rule that chose it."""

    model: str
    quota_s: float
    chunk_tokens: int | None = None
    rule: Rule | None = None


class Placement(NamedTuple):
    """The device of a request, and the rule that chose it."""

    request: Request
    device: DeviceState
    rule: Rule | None = None


class InLine(NamedTuple):
    """A model that waits for its turn on a device, and the rule that put it where it is.

    ``duration_s`` is what its turn would take now, None where the policy does not say.
    """

    model: str
    rule: Rule
    duration_s: float | None = None


class Policy(Protocol):
    """Pure decisions; the core calls, in the order in which things happen.

    ``assign`` may move requests that are held or queued; ``send`` names those to let a
    device have. Both are asked after every batch of events that could change the answer.

    Requests that wait for KV room are none of ``queued``: they take part in nothing but
    ``assign`` until the device admits them. See :func:`waiting_for_kv`.
    """

    name: str

    def check(self, state: State) -> None:
        """Raise :class:`CannotServe` when these models cannot all be served by these devices."""
        ...

    def set_quota_max(self, quota_max_s: float) -> None:
        """Another longest turn, for turns that are planned from now on."""
        ...

    def arrived(self, request: Request, state: State) -> None:
        """A request came in, or lost its device; it is held."""
        ...

    def ended(self, request: Request, state: State) -> None:
        """A request is over; it is in no batch any more."""
        ...

    def assign(self, state: State, now_s: float) -> Iterable[Placement]: ...

    def send(self, device: DeviceState, state: State, now_s: float) -> Iterable[Request]:
        """Which of the device's queued requests it is to have now."""
        ...

    def first_token(self, request: Request, state: State, now_s: float) -> DeviceState | None:
        """The device to go on with a request that has been prefilled; None to stay.

        Asked at its first token, and again and again while its device gives answers away.
        """
        ...

    def roles(self, state: State, now_s: float) -> Iterable[tuple[DeviceState, Role]]:
        """Other roles for devices whose role is not fixed; asked at every tick."""
        ...

    def rebalance(self, state: State, now_s: float) -> Iterable[tuple[Request, DeviceState]]:
        """Answers in progress that go on better elsewhere; asked at every tick."""
        ...

    def next_turn(self, device: DeviceState, state: State, now_s: float) -> Choice | None:
        """Who runs next on an idle device; None when it has no work."""
        ...

    def upcoming(self, device: DeviceState, state: State, now_s: float) -> str | None:
        """Who is likely to run after the present turn, and waits; None while nobody does."""
        ...

    def revise(self, turn: Turn, device: DeviceState, state: State, now_s: float) -> Turn:
        """The turn under way, perhaps with another quota, from its start, or other chunks."""
        ...

    def line(self, device: DeviceState, state: State, now_s: float) -> list[InLine]:
        """Who is to follow the present turn, in order, by the rules of ``upcoming``.

        For explanations: it decides nothing and changes nothing.
        """
        ...


class SimplePolicy:
    """What most policies do where they have nothing special to do."""

    def check(self, state: State) -> None:
        """Any models will do."""

    def set_quota_max(self, quota_max_s: float) -> None:
        """Turns have no longest here."""

    def arrived(self, request: Request, state: State) -> None:
        """Nothing to note."""

    def ended(self, request: Request, state: State) -> None:
        """Nothing to note."""

    def send(self, device: DeviceState, state: State, now_s: float) -> Iterable[Request]:
        return device.queued_requests()

    def first_token(self, request: Request, state: State, now_s: float) -> DeviceState | None:
        """Answers are generated where the prompt was processed, unless that device gives them
        away: then on the one with the fewest requests."""
        assert request.device is not None
        if not state.devices[request.device].gives_away:
            return None
        others = [one for one in state.decode_hosts(request.model) if not one.gives_away]
        return min(others, key=lambda one: (one.num_requests, one.number), default=None)

    def roles(self, state: State, now_s: float) -> Iterable[tuple[DeviceState, Role]]:
        """Roles stay as they are."""
        return ()

    def rebalance(self, state: State, now_s: float) -> Iterable[tuple[Request, DeviceState]]:
        """Answers stay where they are."""
        return ()

    def revise(self, turn: Turn, device: DeviceState, state: State, now_s: float) -> Turn:
        """Turns stay as they are."""
        return turn

    def line(self, device: DeviceState, state: State, now_s: float) -> list[InLine]:
        """Unknown until the present turn is over: whole answers are served."""
        on_turn = device.turn.model if device.turn else None
        names = dict.fromkeys([*device.working, *device.queued])
        return [InLine(name, Rule.UNTIL_DONE) for name in names if name != on_turn]


def waiting_for_kv(state: State) -> Iterator[tuple[Request, list[DeviceState]]]:
    """Requests that wait for KV room, each with the devices of its model where nobody waits.

    Of every line the first; if it is moved at once, the one after it too.
    """
    without_line = [device for device in state.devices.values() if not device.waiting_for_kv]
    if len(without_line) in (0, len(state.devices)):
        return
    for device in state.devices.values():
        for name in list(device.waiting_for_kv):
            hosts = state.prefill_hosts(state.models[name])
            others = [one for one in hosts if not (one.waiting_for_kv or one.is_draining)]
            while others and (line := device.waiting_for_kv.get(name)) is not None:
                request = next(iter(line.requests.values()))
                yield request, others
                if request.device == device.number:
                    break


def working(device: DeviceState) -> list[Batch]:
    """The batches of a device that have requests, in the order in which they got their first."""
    return list(device.working.values())
