"""Token velocity: the tokens per second of each stage, and the number of devices needed.

A stage keeps up while tokens arrive no faster than its velocity (TokenScale, sections III-B and
IV). All rates are tokens per second of one device unless stated otherwise.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
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


@dataclass(frozen=True, slots=True)
class LengthClasses:
    """Upper ends of the prompt and output length classes; the defaults are TokenScale's table II.

    Raises ValueError for ends that do not rise.
    """

    prompt_tokens: tuple[int, ...] = (256, 1024, 8192)
    output_tokens: tuple[int, ...] = (100, 350, 610)

    def __post_init__(self) -> None:
        for ends in (self.prompt_tokens, self.output_tokens):
            if not ends or list(ends) != sorted(set(ends)):
                raise ValueError(f"the ends of length classes must rise, got {ends}")

    def all(self) -> tuple[RequestClass, ...]:
        """Return every class, by prompt length, then output length."""
        return tuple(
            RequestClass(prompt, output)
            for prompt in self.prompt_tokens
            for output in self.output_tokens
        )

    def classify(self, num_prompt_tokens: int, num_output_tokens: int) -> RequestClass:
        """Return the class of a request; lengths beyond the last bound belong to the last class."""
        return RequestClass(
            _class_end(self.prompt_tokens, num_prompt_tokens),
            _class_end(self.output_tokens, num_output_tokens),
        )


def _class_end(ends: tuple[int, ...], num_tokens: int) -> int:
    return ends[min(bisect_left(ends, num_tokens), len(ends) - 1)]


def prefill_token_rate(rates_rps: Mapping[RequestClass, float]) -> float:
    """Return the prompt tokens per second (lambda in equation 2)."""
    return math.fsum(rate * kind.num_prompt_tokens for kind, rate in rates_rps.items())


def prefill_velocity(num_tokens: int, prefill_s: float) -> float:
    """Return the prompt tokens per second of a saturated prefill device (section IV-B2)."""
    return num_tokens / _positive("prefill_s", prefill_s)


def network_velocity(bandwidth_bytes_per_s: float, kv_bytes_per_token: float) -> float:
    """Return the tokens per second whose KV a prefill device can migrate (section III-B)."""
    _positive("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    return bandwidth_bytes_per_s / _positive("kv_bytes_per_token", kv_bytes_per_token)


def measured_decode_velocity(finished: Iterable[RequestClass], duration_s: float) -> float:
    """Return the tokens per second that a saturated decode device drains (equation 1).

    All tokens of a finished request count, prompt and output: new requests enter at the rate at
    which KV is freed, not at the rate of generation.
    """
    num_tokens = sum(request.num_tokens for request in finished)
    return num_tokens / _positive("duration_s", duration_s)


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


def prefillers_needed(token_rate: float, prefill: float, network: float = math.inf) -> int:
    """Return the prefill devices needed for ``token_rate`` prompt tokens/s (equation 2)."""
    return _whole(prefillers_load(token_rate, prefill, network))


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


def decoders_needed(
    rates_rps: Mapping[RequestClass, float], velocities: Mapping[RequestClass, float]
) -> int:
    """Return the decode devices needed for the mix, convertible devices included (equation 3).

    Classes share devices: the sum is rounded up, not each class.
    """
    return _whole(decoders_load(rates_rps, velocities))


def convertible_decoders(max_decoders: int, burst_ratio: float) -> int:
    """Return the decoders that may prefill in a burst: maximum times burst ratio (section
    IV-C2).

    ``burst_ratio`` is the share of tokens above the running mean of their rate, 0 to 1.
    """
    if max_decoders < 0 or not 0 <= burst_ratio <= 1:
        raise ValueError(f"need decoders >= 0, 0 <= ratio <= 1; got {max_decoders}, {burst_ratio}")
    return _whole(max_decoders * burst_ratio)


def regular_decoders(num_decoders: int, num_convertible: int) -> int:
    """Return the decoders besides the convertible decoders, which always run (equation 4)."""
    return max(0, num_decoders - num_convertible)


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


def _whole(load: float) -> int:
    """Return the load rounded up, without the last digits: 3.0000000000000004 needs three."""
    return math.ceil(round(load, 9))
