"""Prediction of the part of a prompt whose KV exists already: the turns before of a conversation.

The share of similar requests is a prediction that is wrong for most single requests, whose prompt
is either new or mostly known, but right in the sum over the prompts that wait for a device. As for
lengths of answers, similar means the same model and a similar prompt length: later turns are
longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpupoold.scheduling.output_length import MAX_MODELS, prompt_class

# The weight of an earlier request falls to a half within so many requests of its class.
_HALF_LIFE_REQUESTS = 32
_DECAY = 0.5 ** (1 / _HALF_LIFE_REQUESTS)
# Until a class has seen some requests, so many without any cached token are counted with them.
_PRIOR_REQUESTS = 4


@dataclass(slots=True)
class _Seen:
    """Tokens of recent prompts of a class, and those of them that were cached."""

    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    num_requests: float = 0.0


class CachedPrompts:
    """Predicts cached tokens from the prompts of earlier requests."""

    def __init__(self) -> None:
        self._models: dict[str, dict[int, _Seen]] = {}  # least recently observed first

    def predict(self, model: str, prompt_tokens: int) -> int:
        """Return the expected number of cached tokens of a prompt."""
        seen = self._models.get(model, {}).get(prompt_class(prompt_tokens))
        if seen is None or not seen.cached_tokens:
            return 0
        unseen = 1 + _PRIOR_REQUESTS / seen.num_requests
        share = seen.cached_tokens / (seen.prompt_tokens * unseen)
        return min(int(share * prompt_tokens), max(prompt_tokens - 1, 0))

    def observe(self, model: str, prompt_tokens: int, cached_tokens: int) -> None:
        """Record a prompt, of which ``cached_tokens`` were not computed."""
        classes = self._models.pop(model, {})
        self._models[model] = classes
        if len(self._models) > MAX_MODELS:
            del self._models[next(iter(self._models))]
        seen = classes.setdefault(prompt_class(prompt_tokens), _Seen())
        seen.num_requests = _DECAY * seen.num_requests + 1
        seen.prompt_tokens = _DECAY * seen.prompt_tokens + prompt_tokens
        seen.cached_tokens = _DECAY * seen.cached_tokens + min(cached_tokens, prompt_tokens)

    def forget(self, model: str) -> None:
        """Drop the record of a model."""
        self._models.pop(model, None)
