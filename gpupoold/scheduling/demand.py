"""Arrivals as work per stage: the number of devices for prefill and for decoding.

Covers the arrivals of :mod:`.arrivals`, by model and class of prompt length; a device's capacity
follows from the model's costs (:mod:`.velocity`). Pure: no clock, no device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gpupoold.scheduling.state import DeviceState, Model, Speed, State
from gpupoold.scheduling.velocity import (
    RequestClass,
    decode_velocity,
    decoders_load,
    network_velocity,
    prefill_velocity,
    prefillers_load,
)

# Share of the TBT target for a step: the decoded batch is not always the largest possible.
_TBT_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Demand:
    """Work by stage as a number of devices, before rounding."""

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
    for one, rate in rates_rps.items():
        tokens = one.num_prompt_tokens
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
        moving = [one for one in device.moving.values() if one.model is model]
        num_answers += len(batch.requests) - batch.num_waiting - batch.num_background + len(moving)
        tokens += batch.context_tokens + sum(one.context_tokens for one in moving)
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
    capacity_bytes, bandwidth, kind = (
        device.up.capacity_bytes,
        device.bandwidth_bytes_per_s,
        device.up.kind,
    )
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
