"""Log-probabilities of vLLM's requests: counted before, and made in slices.

The frontend begins without vLLM, so this module is apart from :mod:`.logprob_bounds`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import RequestState

from gpupoold.frontend.logprob_bounds import count_entries, wanted_by_beams, wanted_entries

_ROWS = 16
"""Positions of a prompt between two looks at the clock."""
_SLICE_S = 0.005


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


class PromptLogprobs:
    """Outputs that are held back until their log-probabilities are made.

    ``states`` are the requests of vLLM's output processor, by engine request.

    vLLM makes the log-probabilities of a step in one piece on the event loop: four prompts of
    1,000 tokens with 20 alternatives each take 0.2 s, and more where tokens end within a
    character.
    """

    def __init__(self, states: Mapping[str, RequestState]) -> None:
        self._states = states
        self._held: dict[str, list[EngineCoreOutput]] = {}  # in the order of the next slices

    def __bool__(self) -> bool:
        """Whether outputs are held back."""
        return bool(self._held)

    def hold(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Hold back outputs with a prompt's log-probabilities, and later ones of their requests.

        Returns the others.
        """
        others = []
        for output in outputs:
            held = self._held.get(output.request_id)
            if held is not None:
                held.append(output)
            elif output.new_prompt_logprobs_tensors is not None:
                self._held[output.request_id] = [output]
            else:
                others.append(output)
        return others

    def advance(self) -> list[EngineCoreOutput]:
        """Make the next slice of a request; return the request's outputs if that was the last."""
        request_id = next(iter(self._held))
        outputs = self._held.pop(request_id)
        state = self._states.get(request_id)
        if state is None or state.logprobs_processor is None:  # the client has left
            return outputs
        until_s = time.monotonic() + _SLICE_S
        while (tensors := outputs[0].new_prompt_logprobs_tensors) is not None:
            state.logprobs_processor._update_prompt_logprobs(_rows(tensors, slice(_ROWS)))
            rest = _rows(tensors, slice(_ROWS, None))
            outputs[0].new_prompt_logprobs_tensors = rest if len(rest.logprobs) else None
            if time.monotonic() >= until_s:
                break
        if outputs[0].new_prompt_logprobs_tensors is None:
            return outputs
        self._held[request_id] = outputs
        return []


def _rows(tensors: Any, rows: slice) -> Any:
    """Return the positions of vLLM's ``LogprobsTensors``."""
    return type(tensors)(
        tensors.logprob_token_ids[rows], tensors.logprobs[rows], tensors.selected_token_ranks[rows]
    )
