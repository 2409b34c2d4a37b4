"""Token velocity: the tokens per second of each stage, and the number of devices needed.

A stage keeps up while tokens arrive no faster than its velocity (TokenScale, sections III-B and
IV). All rates are tokens per second of one device unless stated otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class RequestClass:
    """Requests of about the same prompt and output length, in tokens."""

    num_prompt_tokens: int
    num_output_tokens: int

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1 or self.num_output_tokens < 1:
            raise ValueError(f"a request class has a token of each kind at least, got {self}")

    @property
    def num_tokens(self) -> int:
        """Tokens of KV that a request of the class holds at the end."""
        return self.num_prompt_tokens + self.num_output_tokens


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

    A request stays ``output * tbt`` and holds ``prompt + output / 2`` tokens on average, so that
    ``capacity / (prompt + output / 2)`` requests run at once, or ``max_batch_size``; each frees all
    its tokens at its end. The paper measures the rate instead; ``tbt_s`` is the step time of the
    running batch.
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


def largest_chunk_tokens(step_s: Callable[[int], float], tbt_s: float, max_tokens: int) -> int:
    """Return the largest chunk of a mixed step within the target between tokens (section IV-D).

    A chunk counts the prompt tokens and one token per running answer; ``step_s`` returns the time
    of such a step and must not decrease. 0 means that not even one token is on time.
    """
    _positive("tbt_s", tbt_s)
    fits, too_many = 0, max_tokens + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if step_s(middle) <= tbt_s:
            fits = middle
        else:
            too_many = middle
    return fits


def convertible_prefill_velocity(chunk_tokens: int, mean_batch_size: float, step_s: float) -> float:
    """Return the prompt tokens/s beside running answers: ``(chunk - batch) / step`` (eq. 5).

    0 if the answers alone fill the chunk. ``step_s`` is the target between tokens, or the
    measured time of a step with a full chunk.
    """
    return max(0.0, chunk_tokens - mean_batch_size) / _positive("step_s", step_s)


def reserved_kv_bytes(velocity: float, ttft_s: float, kv_bytes_per_token: float) -> float:
    """Return the memory that a convertible decoder reserves for one prefill (equation 6).

    The memory holds the tokens that the decoder can prefill within the target of the first token:
    a longer prompt goes elsewhere. The time factor is inferred from the paper's text, which names
    the other two factors.
    """
    return _rate(velocity) * ttft_s * kv_bytes_per_token


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    return value


def _rate(value: float) -> float:
    if not value >= 0:
        raise ValueError(f"a rate cannot be negative, got {value}")
    return value
