"""Prefill and decode roles by arrivals (TokenScale, section IV-C).

Roles are split only where a split pays (measurements: docs/internals/scheduling.md): one model has
most of the load, or hot models that need several devices each, the load needs more than one device,
and no device has to switch. Otherwise every device does both, and batches stay whole. All devices
are used: the split makes the busier stage the least busy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpupoold.domain import Role
from gpupoold.scheduling.observed import RequestClass
from gpupoold.scheduling.state import DeviceState, Model, Speed, State

# Share of the TBT target for a step: the decoded batch is not always the largest possible.
_TBT_SHARE = 0.9

# Limits for role changes, found with ``gpupool simulate``.

# Seconds of arrivals needed before a decision.
_OBSERVE_S = 30.0
# A smaller load needs one device: two devices would only halve the batch.
_LEAST_LOAD = 1.0
# Roles are split if the busier stage has less load than the first limit, and stay split up to
# the second limit: spare time of one stage does not help a full stage.
_BUSIEST_TO_SPLIT = 0.95
_BUSIEST_TO_STAY = 1.15
# Least decrease of the busier stage's load for a change to another split.
_WORTHWHILE = 0.1
# How long a wanted split must last, and how long a device keeps its role: convertible
# decoders handle bursts.
_PATIENCE_S = 5.0
_LEAST_STAY_S = 30.0
# Weights must fit beside this share of a device for KV.
_KV_SHARE = 0.3
# Least share in the load of a single model, or of hot models together, each of which needs
# ``_HOT_LOAD`` devices: if many small models take turns, answers on fewer devices lose what
# prompts gain.
_MAIN_SHARE_TO_SPLIT = 0.8
_MAIN_SHARE_TO_STAY = 0.6
_HOT_LOAD = 0.5


def best_split(
    demand: Demand, num_devices: int, least_prefill: int = 1, most_prefill: int | None = None
) -> tuple[int, float]:
    """Return the number of prefill devices that makes the busier stage least busy, and its load.

    Each stage keeps at least one device. Raises ValueError for less than two devices.
    """
    if num_devices < 2:
        raise ValueError(f"stages need a device each, got {num_devices} devices")
    low = max(1, least_prefill)
    high = min(num_devices - 1, num_devices - 1 if most_prefill is None else most_prefill)
    splits = range(low, max(low, high) + 1)
    return min(
        ((num, busiest_stage(demand, num, num_devices)) for num in splits),
        key=lambda split: (split[1], split[0]),
    )


def busiest_stage(demand: Demand, num_prefill: int, num_devices: int) -> float:
    """Return the share of its devices' time that the busier stage needs."""
    return max(demand.prefill / num_prefill, demand.decode / (num_devices - num_prefill))


class RolePlanner:
    """Decides at every tick on at most one role change."""

    def __init__(self) -> None:
        self._changed_s: dict[int, float] = {}
        self._wanted: int | None = None  # number of prefill devices; None: all do both
        self._wanted_since_s = 0.0

    def changes(self, state: State, now_s: float) -> Iterable[tuple[DeviceState, Role]]:
        """Return the next step towards the wanted roles."""
        usable = [state.devices[n] for n in sorted(state.devices)]
        usable = [device for device in usable if not device.is_draining]
        if all(device.is_role_fixed for device in usable):
            return
        if not covers(usable):
            yield from self._step(usable, None, now_s)
            return
        wanted = self._wish(state, usable, now_s)
        if wanted != self._wanted:
            self._wanted, self._wanted_since_s = wanted, now_s
        if now_s - self._wanted_since_s >= _PATIENCE_S:
            yield from self._step(usable, wanted, now_s)

    def _wish(self, state: State, usable: Sequence[DeviceState], now_s: float) -> int | None:
        """Return the wanted number of prefill devices, None if all should do both."""
        num_prefill = sum(device.role is Role.PREFILL for device in usable)
        free = [device for device in usable if not device.is_role_fixed]
        fixed = [device.role for device in usable if device.is_role_fixed]
        present = num_prefill if any(device.role is not Role.MIXED for device in free) else None
        if len(usable) < 2 or Role.MIXED in fixed:
            return None
        arrivals = state.arrivals.recent
        if arrivals.seen_s(now_s) < _OBSERVE_S:
            return present
        models = [state.models[n] for n in arrivals.models(now_s) if n in state.models]
        if not models:
            return present
        if not self._fit_together(models, usable):
            return None
        rates_rps = arrivals.rates_rps(now_s)
        demands = _mean_demands(state, rates_rps, usable)
        main_share = _main_share(demands)
        known = [name for name in rates_rps if name in state.models]
        pairs = zip(known, demands, strict=True)
        hot = [name for name, demand in pairs if demand.total >= _HOT_LOAD]
        if len(hot) > 1:
            demands = _mean_demands(state, rates_rps, usable, hot)
        demand = sum(demands, Demand())
        limit = _MAIN_SHARE_TO_SPLIT if present is None else _MAIN_SHARE_TO_STAY
        if main_share < limit:
            return None
        fixed = [device.role for device in usable if device.is_role_fixed]
        most_prefill = len(usable) - max(1, fixed.count(Role.DECODE))
        best, busiest = best_split(demand, len(usable), fixed.count(Role.PREFILL), most_prefill)
        if present is None:
            pays = demand.total >= _LEAST_LOAD
            return best if pays and busiest <= _BUSIEST_TO_SPLIT else None
        if busiest > _BUSIEST_TO_STAY:
            return None
        if not 0 < present < len(usable):
            return best
        gain = busiest_stage(demand, present, len(usable)) - busiest
        return best if gain > _WORTHWHILE else present

    def _fit_together(self, models: Sequence[Model], usable: Sequence[DeviceState]) -> bool:
        """Return whether every device can hold all requested models at once, with KV."""
        weight_bytes = sum(model.weight_bytes for model in models)
        numbers = {device.number for device in usable}
        room_bytes = min(device.up.capacity_bytes for device in usable) * (1 - _KV_SHARE)
        return weight_bytes <= room_bytes and all(numbers <= model.hosts for model in models)

    def _step(
        self, usable: Sequence[DeviceState], wanted: int | None, now_s: float
    ) -> Iterable[tuple[DeviceState, Role]]:
        """Return one change towards ``wanted`` that leaves each stage a device."""
        for device, role in _nearer(usable, wanted):
            stayed_s = now_s - self._changed_s.get(device.number, -_LEAST_STAY_S)
            is_needed = not covers(usable)  # a stage has lost its last device
            may_change = is_needed or stayed_s >= _LEAST_STAY_S
            if may_change and covers(usable, device, role):
                self._changed_s[device.number] = now_s
                yield device, role
                return


def _main_share(demands: Sequence[Demand]) -> float:
    """Return the share of hot models in the load, at least that of the largest model."""
    loads = [demand.total for demand in demands]
    hot = sum(load for load in loads if load >= _HOT_LOAD)
    return max(hot, max(loads)) / max(sum(loads), 1e-9)


def _mean_demands(
    state: State,
    rates_rps: Mapping[str, Mapping[RequestClass, float]],
    devices: Sequence[DeviceState],
    sharing: Collection[str] = (),
) -> list[Demand]:
    """Return each model's demand for a mean device: devices may differ in size and kind."""
    sizes = Counter((device.up.kind, device.up.capacity_bytes) for device in devices)
    like = {(device.up.kind, device.up.capacity_bytes): device for device in reversed(devices)}
    by_size = [
        (demands_on(state, rates_rps, like[size], sharing), num) for size, num in sizes.items()
    ]
    if len(by_size) == 1:
        return by_size[0][0]
    totals = [Demand() for _ in by_size[0][0]]
    for demands, num in by_size:
        share = num / len(devices)
        scaled = [Demand(share * demand.prefill, share * demand.decode) for demand in demands]
        totals = [total + demand for total, demand in zip(totals, scaled, strict=True)]
    return totals


def covers(
    devices: Sequence[DeviceState], changed: DeviceState | None = None, role: Role = Role.MIXED
) -> bool:
    """Return whether prompts and answers have a device each, if ``changed`` had this role."""
    roles = [role if device is changed else device.role for device in devices]
    has_prompts = any(role is not Role.DECODE for role in roles)
    return has_prompts and any(role is not Role.PREFILL for role in roles)


def _nearer(
    usable: Sequence[DeviceState], wanted: int | None
) -> Iterable[tuple[DeviceState, Role]]:
    """Return changes of free devices towards ``wanted`` prefill devices, cheapest first.

    Answers must migrate when a device begins to prefill, so the device with the fewest changes.
    """
    free = sorted(
        (device for device in usable if not device.is_role_fixed),
        key=lambda device: (device.num_requests, device.number),
    )
    if wanted is None:
        return [(device, Role.MIXED) for device in free if device.role is not Role.MIXED]
    num_more = wanted - sum(device.role is Role.PREFILL for device in usable)
    if num_more > 0:
        return [(device, Role.PREFILL) for device in free if device.role is not Role.PREFILL]
    if num_more < 0:
        return [(device, Role.DECODE) for device in free if device.role is Role.PREFILL]
    return [(device, Role.DECODE) for device in free if device.role is Role.MIXED]


@dataclass(frozen=True, slots=True)
class Demand:
    """Work by stage as a number of devices, before rounding.

    Covers the arrivals by model and class of prompt length; a device's capacity follows from the
    model's costs.
    """

    prefill: float = 0.0
    decode: float = 0.0

    @property
    def total(self) -> float:
        return self.prefill + self.decode

    def __add__(self, other: Demand) -> Demand:
        return Demand(self.prefill + other.prefill, self.decode + other.decode)


def demand_of(
    model: Model,
    rates_rps: Mapping[RequestClass, float],
    capacity_bytes: int,
    bandwidth: float,
    kind: str = "",
    others_s: float = 0.0,
) -> Demand:
    """Return the devices that one model's requests need: equations 2 and 3.

    ``bandwidth``: bytes of KV per second that a device can migrate. ``others_s``: seconds that
    other models' steps take between two tokens.
    """
    speed = model.speed(kind)
    kv_bytes = max(1, model.kv_bytes_per_token)
    network = network_velocity(bandwidth, kv_bytes)
    prefill = 0.0
    for request_class, rate in rates_rps.items():
        tokens = request_class.num_prompt_tokens
        velocity = prefill_velocity(tokens, max(speed.costs.prefill_s(tokens), 1e-6))
        prefill += prefillers_load(rate * tokens, velocity, network)
    room_tokens = max(1.0, (capacity_bytes - model.weight_bytes) / kv_bytes)
    tbt_s = model.targets.tbt_s - others_s
    velocities = {rate: batch_velocity(speed, tbt_s, rate, room_tokens) for rate in rates_rps}
    return Demand(prefill, decoders_load(rates_rps, velocities))


def batch_velocity(speed: Speed, tbt_s: float, kind: RequestClass, room_tokens: float) -> float:
    """Return the decode velocity of the largest batch that is on time and fits in memory."""
    held_tokens = kind.num_prompt_tokens + kind.num_output_tokens / 2
    batch_size, step_s = _largest_batch(speed, tbt_s, held_tokens, room_tokens)
    return decode_velocity(kind, room_tokens, step_s, batch_size)


def _largest_batch(
    speed: Speed, tbt_s: float, held_tokens: float, room_tokens: float
) -> tuple[float, float]:
    """Return the largest on-time batch of answers with this context, and its step time."""
    base_s = speed.step_s(0, 0)
    each_s = max(speed.step_s(1, round(held_tokens)) - base_s, 1e-9)
    batch_size = max(1.0, (_TBT_SHARE * tbt_s - base_s) / each_s)
    batch_size = min(batch_size, max(1.0, room_tokens / max(held_tokens, 1.0)))
    return batch_size, base_s + batch_size * each_s


def decoding_now(
    state: State, model: Model, capacity_bytes: int, kind: str = "", others_s: float = 0.0
) -> float:
    """Return the devices needed by the present answers, for devices of a kind.

    Arrivals alone underestimate until long answers have ended: the first answers to end are short.
    """
    num_answers, tokens = 0, 0
    for number in model.hosts:
        device = state.devices[number]
        batch = device.batches[model.name]
        moving = [request for request in device.moving.values() if request.model is model]
        num_answers += len(batch.requests) - batch.num_waiting - batch.num_background + len(moving)
        tokens += batch.context_tokens + sum(request.context_tokens for request in moving)
    if num_answers <= 0:
        return 0.0
    room_tokens = (capacity_bytes - model.weight_bytes) / max(1, model.kv_bytes_per_token)
    speed, tbt_s = model.speed(kind), model.targets.tbt_s - others_s
    return num_answers / _largest_batch(speed, tbt_s, tokens / num_answers, room_tokens)[0]


def demands_on(
    state: State,
    rates_rps: Mapping[str, Mapping[RequestClass, float]],
    device: DeviceState,
    sharing: Collection[str] = (),
) -> list[Demand]:
    """Return the demand of each known model for devices like ``device``.

    The models in ``sharing`` decode in turns: between two tokens of one, the weights of all are
    read.
    """
    capacity_bytes, kind = device.up.capacity_bytes, device.up.kind
    bandwidth = device.bandwidth_bytes_per_s
    bases_s = {name: state.models[name].speed(kind).step_s(0, 0) for name in sharing}
    demands = []
    for name, rates in rates_rps.items():
        model = state.models.get(name)
        if model is not None:
            others_s = sum(bases_s.values()) - bases_s[name] if name in bases_s else 0.0
            coming = demand_of(model, rates, capacity_bytes, bandwidth, kind, others_s)
            present = decoding_now(state, model, capacity_bytes, kind, others_s)
            decode = max(coming.decode, present)
            demands.append(Demand(coming.prefill, decode))
    return demands


def prefill_velocity(num_tokens: int, prefill_s: float) -> float:
    """Return the prompt tokens per second of a saturated prefill device (section IV-B2)."""
    return num_tokens / _positive("prefill_s", prefill_s)


def network_velocity(bandwidth_bytes_per_s: float, kv_bytes_per_token: float) -> float:
    """Return the tokens per second whose KV a prefill device can migrate (section III-B)."""
    _positive("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    return bandwidth_bytes_per_s / _positive("kv_bytes_per_token", kv_bytes_per_token)


def decode_velocity(
    kind: RequestClass, kv_capacity_tokens: float, tbt_s: float, max_batch_size: float = math.inf
) -> float:
    """Return an estimate of the drain rate of one class by Little's law.

    A request stays ``output * tbt`` and holds ``prompt + output / 2`` tokens on average, so
    ``capacity / (prompt + output / 2)`` requests run at once, or ``max_batch_size``; each frees all
    its tokens at its end. The paper measures the rate; ``tbt_s`` is the running batch's step time.
    """
    held_tokens = kind.num_prompt_tokens + kind.num_output_tokens / 2
    num_running = _positive("kv_capacity_tokens", kv_capacity_tokens) / held_tokens
    num_running = min(num_running, _positive("max_batch_size", max_batch_size))
    residence_s = kind.num_output_tokens * _positive("tbt_s", tbt_s)
    return num_running * kind.num_tokens / residence_s


def prefillers_load(token_rate: float, prefill: float, network: float = math.inf) -> float:
    """Return the needed prefill devices before rounding, ``rate / min(V_P, V_N)`` (eq. 2)."""
    return _rate(token_rate) / _positive("velocity", min(prefill, network))


def decoders_load(
    rates_rps: Mapping[RequestClass, float], velocities: Mapping[RequestClass, float]
) -> float:
    """Return the needed decode devices before rounding (equation 3).

    The sum over classes of arriving tokens, prompt and output, divided by the class's decode
    velocity. Raises ValueError for a class with arrivals and no velocity.
    """
    missing = [kind for kind in rates_rps if kind not in velocities]
    if missing:
        raise ValueError(f"no decode velocity for {missing[0]}; measure or estimate it first")
    return math.fsum(
        _rate(rate) * kind.num_tokens / _positive("velocity", velocities[kind])
        for kind, rate in rates_rps.items()
    )


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    return value


def _rate(value: float) -> float:
    if not value >= 0:
        raise ValueError(f"a rate cannot be negative, got {value}")
    return value
