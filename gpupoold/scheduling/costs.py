"""A model's latency for the scheduling core: a few constants."""

from __future__ import annotations

from dataclasses import dataclass

from gpupoold.latency.models import DecodeBatch, LatencyModel

_PROBE_TOKENS = 1000


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
