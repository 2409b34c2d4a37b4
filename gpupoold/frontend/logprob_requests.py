"""Log-probabilities of vLLM's requests within the bounds of ``logprob_bounds``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from gpupoold.frontend.logprob_bounds import count_entries, wanted_by_beams, wanted_entries


def limit_logprobs(prompt: Any, params: SamplingParams, model_config: Any) -> None:
    """Count the log-probabilities of a request; lower its limit of tokens if the client set none.

    Raises:
        VLLMValidationError: the HTTP request asks for too many.
    """
    if params.detokenize:  # or else a part of a beam search, which has been counted
        params.max_tokens = count_entries(
            wanted_entries(params, _num_tokens(prompt), model_config.get_vocab_size()),
            params.max_tokens or model_config.max_model_len,
            VLLMValidationError,
            is_stream=params.output_kind is RequestOutputKind.DELTA,
        )


def limit_beams(state: Any) -> None:
    """Make the handlers in the state of vLLM's application count beam searches."""
    for name in ("openai_serving_completion", "openai_serving_chat"):
        if (serving := getattr(state, name, None)) is not None:
            serving.beam_search = _limited(serving.beam_search)


def has_logprobs(params: object) -> bool:
    """Return whether a request asks for log-probabilities; pooling requests never do."""
    if not isinstance(params, SamplingParams):
        return False
    return params.num_logprobs is not None or params.prompt_logprobs is not None


def _limited(search: Callable[..., Any]) -> Callable[..., Any]:
    def limited(prompt: Any, request_id: str, params: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = wanted_by_beams(params.beam_width)
        params.max_tokens = count_entries(
            wanted, params.max_tokens, VLLMValidationError, is_stream=False
        )
        return search(prompt, request_id, params, *args, **kwargs)

    return limited


def _num_tokens(prompt: Any) -> int:
    part = prompt.get("decoder_prompt", prompt) if isinstance(prompt, dict) else {}
    return len(part.get("prompt_token_ids") or ())
