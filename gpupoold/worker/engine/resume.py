"""Resumption of a request in another engine, after the tokens that the client has.

The KV is recomputed from prompt and tokens, as in vLLM after a preemption. This module creates the
state that a preempted request has in an engine's process: the worker's record, the state of the
random generator, and the grammar's position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_input_batch import CachedRequestState

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def resume(
    core: EngineCore,
    request: Request,
    wave: int,
    token_ids: Sequence[int],
    attach: Callable[[Request], None] | None = None,
) -> None:
    """Queue ``request`` as if ``core`` had computed ``token_ids`` of its answer.

    ``attach`` is called before queueing, to attach existing KV. :func:`after_grammar` advances a
    grammar by the tokens, after its compilation.
    """
    request.append_output_token_ids(list(token_ids))
    request.num_preemptions = 1
    request.take_prefill_stats()  # the first engine has reported the statistics
    sampling = request.sampling_params
    if sampling is not None and sampling.prompt_logprobs is not None:
        sampling.prompt_logprobs = None  # the first engine has sent the logprobs
        request.skip_reading_prefix_cache = False
    if attach is not None:
        attach(request)
    scheduler: Any = core.scheduler
    if scheduler.use_v2_model_runner:
        # The second runner receives the tokens with the request, and samples by seed and position.
        core.add_request(request, wave)
    else:
        _add_with_record(core, request, wave, token_ids)
    if request.status == RequestStatus.WAITING:
        request.status = RequestStatus.PREEMPTED


def _add_with_record(
    core: EngineCore, request: Request, wave: int, token_ids: Sequence[int]
) -> None:
    """Queue a request for vLLM's first model runner, which records preempted requests."""
    runner: Any = core.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]
    # Before queueing, so that an error here leaves no request in the queue without a record.
    runner.requests[request.request_id] = _record(runner, request, token_ids)
    try:
        core.add_request(request, wave)
    except BaseException:
        del runner.requests[request.request_id]
        raise
    # If the request left this engine a step ago, the worker has not processed its end yet, and
    # would drop the new record when needed.
    scheduler: Any = core.scheduler
    scheduler.finished_req_ids.discard(request.request_id)
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def after_grammar(grammars: StructuredOutputManager, request: Request) -> None:
    """Advance a resumed request's compiled grammar by the tokens of its answer after the
    reasoning.
    """
    if not request.num_preemptions or not request.num_output_tokens:
        return
    grammars.accept_tokens(request, list(request.output_token_ids))
    request.status = RequestStatus.PREEMPTED


def _record(runner: Any, request: Request, token_ids: Sequence[int]) -> CachedRequestState:
    record = CachedRequestState(
        req_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids or ()),
        mm_features=request.mm_features,
        sampling_params=request.sampling_params,
        generator=_generator(runner, request.sampling_params, len(token_ids)),
        block_ids=([],) * len(runner.kv_cache_config.kv_cache_groups),
        num_computed_tokens=0,
        output_token_ids=list(token_ids),
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
