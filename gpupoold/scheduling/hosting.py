"""Hosting: the devices that have the engine of a model. Pure.

An engine takes memory outside the device's pages (graphs, workspaces, allocator), and a device has
a limit for the sum. As long as all engines fit, every device hosts every model. Otherwise a model
has at least one device, and further devices while memory is left or requests would be late; idle
engines are evicted for others, first those whose model has another device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpupoold.scheduling.events import Hostable
from gpupoold.scheduling.observed import LASTING_S
from gpupoold.scheduling.rules import ReasonName
from gpupoold.scheduling.state import State
from gpupoold.scheduling.wait_estimate import first_token_in_s

LATE_IDLE_S = 60.0
"""Seconds without use after which an engine is evicted for the late requests of another model."""

HOME_IDLE_S = LASTING_S
"""Seconds without use after which the only engine of a model makes place for a planned home."""

HOSTABLE_PERIOD_S = 5.0
"""Seconds between looks at devices that could become homes; policies plan homes as often."""

SHARED_S = 5.0
"""Seconds after which an engine in use goes on to the requests of another fine-tune."""

_PROMPT_TOKENS = 256


class HostingReason(ReasonName):
    """The reason for an engine on a device."""

    FIXED = "fixed", "the device was chosen by hand"
    NEEDED = "needed", "no other device in service had the model"
    HOME = "home", "the planned home of the model, by the arrivals of the last minutes"
    LATE = "late", "requests would have been late on the other devices"
    SHARED = "shared", "requests waited, and a fine-tune had used the engine for some seconds"
    SPARE = "spare", "the device had memory for the engine"


@dataclass(frozen=True, slots=True)
class HostedEngine:
    """An engine on a device; ``num_bytes`` counts the memory outside the pages.

    An engine is busy while its model has requests on the device or changes its engines, or while
    the model has requests and no other device. ``idle_s`` are the seconds since the model's last
    use, and ``is_home`` whether the model's requests are planned for this device. Its end frees
    ``freed_bytes``, which is less than ``num_bytes`` if the engine was charged with memory that all
    engines share. A model of the same ``layout`` can take the engine over. An engine in use goes
    only to a model of the same ``family``, after ``served_s`` with its present model.
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
    snapshots in host memory, by device. ``is_next``: of the models of its ``family`` whose requests
    have no engine, this has waited for the longest time.
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
    is_next: bool = False

    def need(self, device: int) -> int:
        return (self.need_bytes or {}).get(device, 0)

    def allows(self, device: int) -> bool:
        """Return whether the device may host the model."""
        return device not in self.undivided and (not self.fixed or device in self.fixed)


class EngineWaits:
    """Since when the requests of models have waited for an engine."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def is_next(self, name: str, now_s: float, is_rival: Callable[[str], bool]) -> bool:
        """Note that a model waits; return whether no rival has waited for longer."""
        since_s = self._since_s.setdefault(name, now_s)
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
    lacking = [
        device
        for device in devices
        if model.name not in device.engines and model.allows(device.number)
    ]
    if model.fixed:
        fitting = [
            device for device in lacking if _victims(model, device, HostingReason.FIXED) is not None
        ]
        return [
            HostingChoice(device.number, HostingReason.FIXED) for device in _sorted(model, fitting)
        ]
    if not model.is_wanted:
        return []
    hosts = [device for device in devices if model.name in device.engines]
    is_hosted = any(not host.is_draining for host in hosts)
    candidates = [device for device in lacking if not device.is_draining]
    if not candidates and not hosts:
        candidates = lacking
    first = _first(model, candidates, is_hosted=is_hosted)
    spare = [
        HostingChoice(candidate.number, HostingReason.SPARE)
        for candidate in candidates
        if not candidate.is_draining and not candidate.short_bytes(model.need(candidate.number))
    ]
    return [
        *first,
        *(choice for choice in spare if choice.device not in {two.device for two in first}),
    ]


def _first(
    model: HostingModel, candidates: Sequence[HostingDevice], *, is_hosted: bool
) -> list[HostingChoice]:
    """Return the device to load the model at once, if necessary by evicting other engines."""
    home = next(
        (candidate for candidate in candidates if is_hosted and candidate.number == model.home),
        None,
    )
    if home is not None and _victims(model, home, HostingReason.HOME) is not None:
        return [HostingChoice(home.number, HostingReason.HOME)]
    if is_hosted and not model.is_late:
        return []
    reason = HostingReason.LATE if is_hosted else HostingReason.NEEDED
    fitting = [
        candidate for candidate in candidates if _victims(model, candidate, reason) is not None
    ]
    if not (is_hosted or fitting) and model.is_next:
        reason = HostingReason.SHARED
        fitting = [
            candidate for candidate in candidates if _victims(model, candidate, reason) is not None
        ]
    if is_hosted:  # a busy device would not help
        fitting = [device for device in fitting if not device.num_requests and not device.num_loads]
    return [HostingChoice(device.number, reason) for device in _sorted(model, fitting)[:1]]


def victims(
    device: HostingDevice, num_bytes: int, reason: HostingReason, layout: str = "", family: str = ""
) -> list[str] | None:
    """Return the models whose engines make place for ``num_bytes``, the least useful first.

    A single engine of ``layout``, if given, is enough, because it is taken over. Empty if there is
    enough memory, None if too little can be freed. Engines chosen by hand and busy engines stay,
    except that the ``SHARED`` engine of a ``family`` leaves if no idle engines are enough. A
    spare engine replaces no other. A planned home replaces only engines of models that have another
    home, and another device or no use for ``HOME_IDLE_S``; late requests replace only engines of
    models that have another device and were not used for ``LATE_IDLE_S``.
    """
    short_bytes = device.short_bytes(num_bytes)
    if not short_bytes:
        return []
    leaving = [engine for engine in device.engines.values() if _may_leave(engine, reason)]
    leaving.sort(key=_usefulness)
    alike = [engine.model for engine in leaving if layout and engine.layout == layout]
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
    holder = shared(device, family) if reason is HostingReason.SHARED else ""
    return [holder] if holder else None


def shared(device: HostingDevice, family: str) -> str:
    """Return the model whose engine in use goes to requests of the ``family``, empty if none."""
    engines = [
        (engine.served_s, engine.model)
        for engine in device.engines.values()
        if family and engine.family == family and not engine.is_fixed
    ]
    served_s, model = max(engines, default=(0.0, ""))
    return model if served_s >= SHARED_S else ""


def is_taken_over(device: HostingDevice, chosen: Sequence[str], layout: str) -> bool:
    """Return whether a model of ``layout`` takes over the engine of the first ``chosen`` model."""
    return bool(layout and chosen) and device.engines[chosen[0]].layout == layout


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
            and _victims(model, device, HostingReason.HOME) is not None
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


def _victims(model: HostingModel, device: HostingDevice, reason: HostingReason) -> list[str] | None:
    layout = _layout(model, device)
    return victims(device, model.need(device.number), reason, layout, model.family)


def _layout(model: HostingModel, device: HostingDevice) -> str:
    return (model.layouts or {}).get(device.number, "")


def _may_leave(engine: HostedEngine, reason: HostingReason) -> bool:
    if engine.is_busy or engine.is_fixed or reason is HostingReason.SPARE:
        return False
    if reason is HostingReason.HOME:
        is_unused = not engine.is_only or engine.idle_s >= HOME_IDLE_S
        return is_unused and not engine.is_home
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
        evicted = _victims(model, device, HostingReason.NEEDED) or []
        is_bound = is_taken_over(device, evicted, _layout(model, device)) and not device.num_loads
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
