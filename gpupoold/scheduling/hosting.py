"""Hosting: the devices that have the engine of a model. Pure.

An engine takes memory outside the device's pages (graphs, workspaces, allocator), and a device has
a limit for the sum. As long as all engines fit, every device hosts every model. Otherwise a model
has at least one device, and further devices while memory is left or requests would be late; idle
engines are evicted for others, first those whose model has another device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpupoold.domain import Role
from gpupoold.scheduling.events import Hostable
from gpupoold.scheduling.observed import LASTING_S
from gpupoold.scheduling.rules import ReasonName
from gpupoold.scheduling.state import DeviceState, State
from gpupoold.scheduling.wait_estimate import first_token_in_s

# Seconds without use after which an engine is evicted for the late requests of another model.
LATE_IDLE_S = 60.0
# Seconds without use after which an engine is evicted for a model without a device for answers or
# for prompts that would be late, or without a device for prompts.
ROLE_IDLE_S, PROMPTS_IDLE_S = 60.0, 300.0
# Seconds without use after which the only engine of a model makes place for a planned home.
HOME_IDLE_S = LASTING_S
# Seconds between looks at devices that could become homes; policies plan homes as often.
HOSTABLE_PERIOD_S = 5.0
# Least seconds in use of an engine whose requests are all late, or that goes to a starving model.
SHARED_S = 5.0
# Seconds after which requests get an engine in use, however urgent its own requests are.
STARVING_S = 20.0
# Seconds by which the requests of an engine in use are less urgent than those that get it.
_LEAST_GAIN_S = 1.0
# The longest use of an engine that fine-tunes share, without a token of requests from before.
_MOST_SILENT_S = 30.0

_PROMPT_TOKENS = 256


class HostingReason(ReasonName):
    """The reason for an engine on a device."""

    FIXED = "fixed", "the device was chosen by hand"
    NEEDED = "needed", "no other device in service had the model"
    HOME = "home", "the planned home of the model, by the arrivals of the last minutes"
    ROLE = "role", "no device with the model was there for answers, or for prompts in time"
    PROMPTS = "prompts", "no device with the model was there for prompts"
    LATE = "late", "requests would have been late on the other devices"
    SHARED = "shared", "its requests were more urgent than those of the engine's model"
    SPARE = "spare", "the device had memory for the engine"


@dataclass(frozen=True, slots=True)
class HostedEngine:
    """An engine on a device; ``num_bytes`` counts the memory outside the pages.

    An engine is busy while its model has requests on the device or changes its engines, or while
    the model has requests and no other device. ``idle_s`` are the seconds since the model's last
    use, and ``is_home`` whether the model's requests are planned for this device. Its end frees
    ``freed_bytes``, which is less than ``num_bytes`` if the engine was charged with memory that all
    engines share. A model of the same ``layout`` can take the engine over. An engine in use goes
    only to a model of the same ``family``; its present model has had the engine for ``served_s``,
    and needs the engine in ``slack_s``, as of :func:`slack_of`.
    """

    model: str
    num_bytes: int
    is_busy: bool = False
    is_only: bool = False
    is_fixed: bool = False
    is_home: bool = False
    idle_s: float = math.inf
    freed_bytes: int | None = None
    layout: str = ""
    family: str = ""
    served_s: float = 0.0
    slack_s: float = 0.0

    @property
    def gain_bytes(self) -> int:
        return self.num_bytes if self.freed_bytes is None else self.freed_bytes


@dataclass(frozen=True, slots=True)
class HostingDevice:
    """A device that can load engines; ``limit_bytes`` is None without a limit.

    ``kept_bytes`` are in use without an engine: libraries and kernels. ``num_loads`` counts loads
    that wait or run on the device.
    """

    number: int
    engines: Mapping[str, HostedEngine]
    limit_bytes: int | None = None
    num_requests: int = 0
    num_loads: int = 0
    is_draining: bool = False
    kept_bytes: int = 0
    role: Role = Role.MIXED

    @property
    def used_bytes(self) -> int:
        return self.kept_bytes + sum(engine.num_bytes for engine in self.engines.values())

    def short_bytes(self, num_bytes: int) -> int:
        """Return by how much an engine of ``num_bytes`` would exceed the limit, or 0."""
        if self.limit_bytes is None:
            return 0
        return max(0, self.used_bytes + num_bytes - self.limit_bytes)


@dataclass(frozen=True, slots=True)
class HostingModel:
    """A model that may need devices; ``fixed`` are the devices chosen by hand, empty for none.

    ``need_bytes`` is the expected memory of its engine by device. ``is_wanted`` is false while the
    model was evicted and has no requests. ``home`` is the device planned for its requests. The GPUs
    of the ``undivided`` devices cannot share the model equally. ``layouts`` are those of the
    snapshots in host memory, by device. If its requests have no engine, their next token is due in
    ``slack_s``; ``is_starving``: they have waited for ``STARVING_S``, and for the longest time in
    their ``family``.
    """

    name: str
    fixed: frozenset[int] = frozenset()
    need_bytes: Mapping[int, int] | None = None
    is_wanted: bool = True
    is_late: bool = False
    home: int | None = None
    undivided: frozenset[int] = frozenset()
    layouts: Mapping[int, str] | None = None
    family: str = ""
    slack_s: float = math.inf
    is_starving: bool = False

    def need(self, device: int) -> int:
        return (self.need_bytes or {}).get(device, 0)

    def allows(self, device: int) -> bool:
        """Return whether the device may host the model."""
        return device not in self.undivided and (not self.fixed or device in self.fixed)


class EngineWaits:
    """Since when the requests of models have waited for an engine."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def is_starving(self, name: str, now_s: float, is_rival: Callable[[str], bool]) -> bool:
        """Note that a model waits; return whether the wait is long, and no rival's is longer."""
        since_s = self._since_s.setdefault(name, now_s)
        if now_s - since_s < STARVING_S:
            return False
        earlier = (other for other, other_s in self._since_s.items() if other_s < since_s)
        return not any(map(is_rival, earlier))

    def end(self, name: str) -> None:
        self._since_s.pop(name, None)


class HostingChoice(NamedTuple):
    """A device that should load the model's engine, and the reason."""

    device: int
    reason: HostingReason


def choose(model: HostingModel, devices: Sequence[HostingDevice]) -> list[HostingChoice]:
    """Return the devices that should load the model now, the best first.

    ``devices`` are all devices that can load. Devices that drain get a model only without another
    device, or by hand.
    """
    allowed = [each for each in devices if model.allows(each.number)]
    lacking = [device for device in allowed if model.name not in device.engines]
    if model.fixed:
        reason = HostingReason.FIXED
        fitting = [device for device in lacking if victims(model, device, reason) is not None]
        return [HostingChoice(device.number, reason) for device in _sorted(model, fitting)]
    if not model.is_wanted:
        return []
    hosts = [device for device in devices if model.name in device.engines]
    roles = {host.role for host in hosts if not host.is_draining}
    is_hosted = bool(roles)
    candidates = [device for device in lacking if not device.is_draining]
    if not candidates and not hosts:
        candidates = lacking
    first = _first(model, candidates, is_hosted=is_hosted) or _of_role(model, candidates, roles)
    spare = [
        HostingChoice(each.number, HostingReason.SPARE)
        for each in candidates
        if not (each.is_draining or each.short_bytes(model.need(each.number)))
    ]
    begun = {choice.device for choice in first}
    return [*first, *(choice for choice in spare if choice.device not in begun)]


def _first(
    model: HostingModel, candidates: Sequence[HostingDevice], *, is_hosted: bool
) -> list[HostingChoice]:
    """Return the device to load the model at once, if necessary by evicting other engines."""

    def fitting(reason: HostingReason) -> list[HostingDevice]:
        return [device for device in candidates if victims(model, device, reason) is not None]

    homes = [device for device in candidates if is_hosted and device.number == model.home]
    if homes and victims(model, homes[0], HostingReason.HOME) is not None:
        return [HostingChoice(homes[0].number, HostingReason.HOME)]
    if is_hosted and not model.is_late:
        return []
    reason = HostingReason.LATE if is_hosted else HostingReason.NEEDED
    devices = fitting(reason)
    if not (is_hosted or devices) and model.family:
        reason = HostingReason.SHARED
        devices = fitting(reason)
    if is_hosted:  # a busy device would not help
        devices = [device for device in devices if not device.num_requests and not device.num_loads]
    return [HostingChoice(device.number, reason) for device in _sorted(model, devices)[:1]]


def lacks_role(roles: Collection[Role]) -> bool:
    """Return whether devices of these roles, at least one, are all for prompts or for answers."""
    return set(roles) in ({Role.PREFILL}, {Role.DECODE})


def _of_role(
    model: HostingModel, candidates: Sequence[HostingDevice], roles: Collection[Role]
) -> list[HostingChoice]:
    """Return the device to load a model whose devices are all for prompts, or all for answers.

    Answers are urgent: on a device for prompts they wait behind the prompts of all models. Prompts
    on a device for answers are urgent only if they are late.
    """
    if not lacks_role(roles):
        return []
    is_urgent = model.is_late or Role.PREFILL in roles
    reason = HostingReason.ROLE if is_urgent else HostingReason.PROMPTS
    fitting = [
        candidate
        for candidate in candidates
        if candidate.role not in roles
        and not candidate.num_loads
        and victims(model, candidate, reason) is not None
    ]
    return [HostingChoice(device.number, reason) for device in _sorted(model, fitting)[:1]]


def victims(model: HostingModel, device: HostingDevice, reason: HostingReason) -> list[str] | None:
    """Return the models whose engines make place for a model's engine, the least useful first.

    A single engine that the model takes over is enough. Empty if there is enough memory, None if
    too little can be freed. Engines chosen by hand and busy engines stay, except that the
    ``SHARED`` engine of the family leaves if no idle engines are enough. A spare engine replaces no
    other. A planned home replaces only engines of models that have another home, and another device
    or no use for ``HOME_IDLE_S``; ``ROLE`` and ``PROMPTS`` replace only engines without use for
    ``ROLE_IDLE_S`` and ``PROMPTS_IDLE_S``; late requests replace only engines of models that have
    another device and were not used for ``LATE_IDLE_S``.
    """
    short_bytes = device.short_bytes(model.need(device.number))
    if not short_bytes:
        return []
    leaving = [engine for engine in device.engines.values() if _may_leave(engine, reason)]
    leaving.sort(key=_usefulness)
    alike = [engine.model for engine in leaving if _fits(model, engine, device.number)]
    if alike:
        return alike[:1]
    chosen: list[str] = []
    for engine in leaving:
        if short_bytes <= 0:
            break
        if engine.gain_bytes:
            chosen.append(engine.model)
            short_bytes -= engine.gain_bytes
    if short_bytes <= 0:
        return chosen
    holder = shared(model, device) if reason is HostingReason.SHARED else ""
    return [holder] if holder else None


def shared(model: HostingModel, device: HostingDevice) -> str:
    """Return the holder of an engine in use that goes to requests of ``model``, empty if none.

    The engine that its requests need last, if those are less urgent. Else, for a model that
    starves, the engine in use for longest.
    """
    engines = [
        engine
        for engine in device.engines.values()
        if model.family and engine.family == model.family and not engine.is_fixed
    ]
    used = [(engine.served_s, engine.model) for engine in engines if engine.served_s >= SHARED_S]
    spare = [
        (engine.slack_s, engine.served_s, engine.model)
        for engine in engines
        if engine.slack_s > model.slack_s + _LEAST_GAIN_S
        and (engine.slack_s < math.inf or engine.served_s >= SHARED_S)
    ]
    if spare:
        return max(spare)[-1]
    return max(used)[-1] if model.is_starving and used else ""


def slack_of(deadlines_s: Iterable[float], now_s: float) -> float:
    """Return the seconds to the first deadline, infinite if all have passed.

    Requests that are late are no reason to take an engine from others, as for planned turns.
    """
    return min((at_s for at_s in deadlines_s if at_s >= now_s), default=math.inf) - now_s


def slack_on(device: DeviceState, name: str, now_s: float) -> float:
    """Return the slack of a model's requests on a device; 0 without any, and while some move."""
    moving = (request.model.name == name for request in device.moving.values())
    queues = (device.working, device.queued, device.waiting_for_kv)
    batches = [queue[name] for queue in queues if name in queue]
    if not batches or any(moving):
        return 0.0
    return slack_of((at_s for batch in batches for at_s in batch.deadlines_s), now_s)


def served_s(since_s: float, signs_s: Iterable[float], now_s: float) -> float:
    """Return the seconds for which an engine has served its model, since ``since_s``.

    ``signs_s`` are the times of the arrival or the latest token of each request. 0 while requests
    from before have no token since: what their prompts have computed could be lost again and again,
    if their KV is not kept.
    """
    in_use_s = now_s - since_s
    is_silent = any(sign_s < since_s for sign_s in signs_s)
    return 0.0 if is_silent and in_use_s < _MOST_SILENT_S else in_use_s


def is_taken_over(model: HostingModel, device: HostingDevice, chosen: Sequence[str]) -> bool:
    """Return whether the model takes over the engine of the first ``chosen`` model."""
    return bool(chosen) and _fits(model, device.engines[chosen[0]], device.number)


def idle(device: HostingDevice) -> HostingDevice:
    """Return the device as if its requests had ended."""
    engines = {name: replace(engine, is_busy=False) for name, engine in device.engines.items()}
    return replace(device, engines=engines)


def hostable_change(
    state: State, model: HostingModel, devices: Sequence[HostingDevice]
) -> Hostable | None:
    """Return the devices that load the model's engine, and those that could become its home.

    ``devices`` are as if their requests had ended (``idle``). None for the devices in ``state``, or
    an unknown model.
    """
    known = state.models.get(model.name)
    if known is None:
        return None
    further = {
        device.number
        for device in devices
        if model.name in device.engines
        or (
            not device.is_draining
            and model.allows(device.number)
            and victims(model, device, HostingReason.HOME) is not None
        )
    } - known.hosts
    return Hostable(model.name, tuple(sorted(further))) if further != known.hostable else None


def is_late(state: State, name: str, now_s: float) -> bool:
    """Return whether a new request of the model would get its first token after the target."""
    model = state.models.get(name)
    if model is None:
        return False
    wait_s = first_token_in_s(state, model, _PROMPT_TOKENS, now_s)
    return wait_s is not None and wait_s > model.targets.ttft_s


def _fits(model: HostingModel, engine: HostedEngine, device: int) -> bool:
    """Return whether a model can take over an engine, as far as its family is known."""
    layout = (model.layouts or {}).get(device)
    is_alike = not model.family or engine.family == model.family
    return bool(layout) and engine.layout == layout and is_alike


def _may_leave(engine: HostedEngine, reason: HostingReason) -> bool:
    if engine.is_busy or engine.is_fixed or reason is HostingReason.SPARE:
        return False
    if reason is HostingReason.HOME:
        is_unused = not engine.is_only or engine.idle_s >= HOME_IDLE_S
        return is_unused and not engine.is_home
    if reason is HostingReason.ROLE:
        return engine.idle_s >= ROLE_IDLE_S
    if reason is HostingReason.PROMPTS:
        return engine.idle_s >= PROMPTS_IDLE_S
    if reason is HostingReason.LATE:
        return not engine.is_only and engine.idle_s >= LATE_IDLE_S
    return True


def _usefulness(engine: HostedEngine) -> tuple[bool, bool, float]:
    return engine.is_only, engine.is_home, -engine.idle_s


def _sorted(model: HostingModel, devices: Sequence[HostingDevice]) -> list[HostingDevice]:
    """Return the devices: those with an engine to take over, which needs no load, then the planned
    home, then those without evictions and with little work.

    Among devices without work, those are first with few models that have no other device.
    """

    def cost(device: HostingDevice) -> tuple[bool, bool, bool, bool, int, int, int, int]:
        evicted = victims(model, device, HostingReason.NEEDED) or []
        is_bound = is_taken_over(model, device, evicted) and not device.num_loads
        ends_others = any(device.engines[name].is_only for name in evicted)
        work = device.num_loads, device.num_requests
        num_only = sum(engine.is_only for engine in device.engines.values())
        is_home = device.number == model.home
        return (
            not is_bound,
            ends_others,
            not is_home,
            bool(evicted),
            *work,
            num_only,
            device.number,
        )

    return sorted(devices, key=cost)
