"""Records of requests in vLLM's first model runner, for requests that continue after tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.worker.gpu_input_batch import CachedRequestState


class ResumedRequest(NamedTuple):
    """What the worker of each rank needs for its record of a request."""

    request_id: str
    prompt_token_ids: list[int]
    mm_features: list[Any]
    sampling_params: SamplingParams | None
    lora_request: LoRARequest | None
    output_token_ids: list[int]


def new_record(runner: Any, request: ResumedRequest) -> CachedRequestState:
    """Return the record that ``runner`` would have of a preempted request."""
    num_drawn = len(request.output_token_ids)
    record = CachedRequestState(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=request.mm_features,
        sampling_params=request.sampling_params,
        generator=_generator(runner, request.sampling_params, num_drawn),
        block_ids=([],) * len(runner.kv_cache_config.kv_cache_groups),
        num_computed_tokens=0,
        output_token_ids=list(request.output_token_ids),
        lora_request=request.lora_request,
    )
    if runner.uses_mrope:  # positions in images, as for a new request
        runner._init_mrope_positions(record)
    return record


def _generator(
    runner: Any, sampling: SamplingParams | None, num_drawn: int
) -> torch.Generator | None:
    """Return the generator of a seeded request after ``num_drawn`` tokens.

    vLLM's own sampler draws the tokens, because the consumption of random numbers differs between
    devices.
    """
    if sampling is None or sampling.sampling_type != SamplingType.RANDOM_SEED:
        return None
    assert sampling.seed is not None
    generator = torch.Generator(device=runner.device)
    generator.manual_seed(sampling.seed)
    size = runner.input_batch.vocab_size
    for _ in range(num_drawn):
        logits = torch.zeros(1, size, device=runner.device)
        runner.sampler.topk_topp_sampler(logits, {0: generator}, None, None)
    return generator
