"""Outputs of engine steps that no engine made: of simulated devices, and of repeated tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists

from gpupoold.wire.continuation import OutputSoFar
from gpupoold.wire.messages import RequestProgress

_FINISH_REASONS = {str(reason): reason for reason in FinishReason}


def make_outputs(progress: Sequence[RequestProgress]) -> EngineCoreOutputs:
    """Return outputs as an engine would have made for these tokens."""
    outputs = [
        EngineCoreOutput(
            one.request_id,
            one.new_token_ids,
            finish_reason=_FINISH_REASONS[one.finish_reason] if one.finish_reason else None,
        )
        for one in progress
    ]
    return EngineCoreOutputs(outputs=outputs)


def repeat_outputs(request: EngineCoreRequest, so_far: OutputSoFar) -> list[EngineCoreOutput]:
    """Return the outputs of a request whose tokens are known, one for each token.

    The log-probabilities are 0: the fleet's entrance drops those of repeated tokens.
    """
    params = request.sampling_params
    found = [EngineCoreOutput(request.request_id, [token_id]) for token_id in so_far.token_ids]
    if params is not None and params.num_logprobs is not None:
        for one in found:
            ids = np.array([one.new_token_ids])
            one.new_logprobs = LogprobsLists(ids, np.zeros((1, 1)), np.array([1]))
    if so_far.finish_reason:
        found[-1].finish_reason = _FINISH_REASONS[so_far.finish_reason]
    return found
