"""Log-probabilities in vLLM's model runners, with bounded memory and without a compiler.

vLLM compiles its count of ranks at the first request with log-probabilities: all steps of the
process wait for 5 s. Its first runner also takes the logits of all prompt tokens of a step in one
piece, 3 GB for 2,048 tokens of a vocabulary of 152,000, which no profiling run has seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample import sampler
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu.sample import prompt_logprob

MAX_ROWS = 128
"""Prompt tokens of a request whose logits exist at one time."""

_Compute = Callable[[Any, torch.Tensor, dict[str, int]], dict[str, Any]]


def bound_logprobs() -> None:
    """Change both of vLLM's model runners; again has no effect."""
    sampler.batched_count_greater_than = count_not_less
    prompt_logprob.CHUNK_SIZE = MAX_ROWS
    runner = gpu_model_runner.GPUModelRunner
    if not hasattr(runner._get_prompt_logprobs_dict, "__wrapped__"):
        runner._get_prompt_logprobs_dict = _in_slices(runner._get_prompt_logprobs_dict)


def count_not_less(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return for each row of ``x`` (rows, columns) how many numbers are at least the row's of
    ``values`` (rows, 1)."""
    return (x >= values).sum(-1)


def _in_slices(compute: _Compute) -> _Compute:
    """Return vLLM's function for a step's prompts, called for ``MAX_ROWS`` tokens at a time.

    vLLM finds a request's tokens by how many are computed, and its rows in ``hidden_states`` from
    the request's first row on.
    """

    @functools.wraps(compute)
    def in_slices(
        self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for request_id in self.num_prompt_logprobs.keys() & num_scheduled_tokens.keys():
            request, num_tokens = self.requests[request_id], num_scheduled_tokens[request_id]
            num_computed = request.num_computed_tokens
            for first in range(0, num_tokens, MAX_ROWS):
                request.num_computed_tokens = num_computed + first
                num_in_slice = min(MAX_ROWS, num_tokens - first)
                found |= compute(self, hidden_states[first:], {request_id: num_in_slice})
            request.num_computed_tokens = num_computed
        return found

    return in_slices
