"""Log-probabilities of prompts, made in slices; :mod:`.vllm_bounds` counts them before."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import RequestState

_ROWS = 16
"""Positions of a prompt between two looks at the clock."""
_SLICE_S = 0.005


def has_logprobs(params: object) -> bool:
    """Return whether a request asks for log-probabilities; pooling requests never do."""
    if not isinstance(params, SamplingParams):
        return False
    return params.num_logprobs is not None or params.prompt_logprobs is not None


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
