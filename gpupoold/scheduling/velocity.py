"""Token velocity: the tokens per second of each stage, the number of devices needed, and costs.

A stage keeps up while tokens arrive no faster than its velocity (TokenScale, sections III-B and
IV). All rates are tokens per second of one device unless stated otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpupoold.latency.models import DecodeBatch, LatencyModel

_PROBE_TOKENS = 1000


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


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Constants of step times.

    A prefill of ``t`` tokens takes ``base + t * token + t^2 * token2`` seconds, a decode step of
    ``n`` sequences with ``c`` tokens of context in total ``base + n * sequence + c * context``. The
    defaults are a guess for an unmeasured model; the core corrects steps by observation.
    """

    prefill_base_s: float = 0.02
    prefill_token_s: float = 1e-4
    prefill_token2_s: float = 0.0
    decode_base_s: float = 0.02
    decode_sequence_s: float = 0.0
    decode_context_s: float = 0.0

    def prefill_s(self, prompt_tokens: int) -> float:
        """Return the seconds to prefill one prompt."""
        return self.prefills_s(1, prompt_tokens, prompt_tokens * prompt_tokens)

    def prefills_s(self, num_prompts: int, num_tokens: int, num_tokens2: int) -> float:
        """Return the seconds to prefill prompts; ``num_tokens2`` is the sum of squares."""
        return (
            num_prompts * self.prefill_base_s
            + num_tokens * self.prefill_token_s
            + num_tokens2 * self.prefill_token2_s
        )

    def chunk_s(self, done_tokens: int, num_tokens: int) -> float:
        """Return the seconds that ``num_tokens`` more prompt tokens add to a step.

        See :meth:`mixed_step_s` of :class:`.LatencyModel`.
        """
        tokens2 = num_tokens * (num_tokens + 2 * done_tokens)
        return num_tokens * self.prefill_token_s + tokens2 * self.prefill_token2_s

    def step_s(self, batch_size: int, context_tokens: int) -> float:
        """Return the seconds of a decode step of ``batch_size`` sequences with
        ``context_tokens`` in total.
        """
        return (
            self.decode_base_s
            + batch_size * self.decode_sequence_s
            + context_tokens * self.decode_context_s
        )


POOLING_COSTS = ModelCosts(decode_base_s=0.0)
"""A guess for an unmeasured pooling model, which has no decode steps."""


def costs_of(latency: LatencyModel) -> ModelCosts:
    """Return the constants of a latency model whose forms are those of ``ModelCosts``."""
    prefill = latency.prefill.predict_s
    base_s, once_s, twice_s = (
        prefill([tokens]) for tokens in (0, _PROBE_TOKENS, 2 * _PROBE_TOKENS)
    )
    square_s = (twice_s - 2 * once_s + base_s) / (2 * _PROBE_TOKENS**2)
    decode = latency.decode.predict_s
    one_s = decode(DecodeBatch(1, 0))
    sequence_s = decode(DecodeBatch(2, 0)) - one_s
    context_s = (decode(DecodeBatch(1, _PROBE_TOKENS)) - one_s) / _PROBE_TOKENS
    return ModelCosts(
        prefill_base_s=base_s,
        prefill_token_s=(once_s - base_s) / _PROBE_TOKENS - square_s * _PROBE_TOKENS,
        prefill_token2_s=square_s,
        decode_base_s=one_s - sequence_s,
        decode_sequence_s=sequence_s,
        decode_context_s=context_s,
    )
