"""Resumption of a request in another engine, after the tokens that the client has.

The KV is recomputed from prompt and tokens, as in vLLM after a preemption. This module creates the
state that a preempted request has in an engine's process: the worker's record, the state of the
random generator, and the grammar's position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request, RequestStatus

from gpupoold.worker.engine.grammars import EngineGrammars
from gpupoold.worker.engine.pooled_memory import ResumedRequest

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
    executor: Any = core.model_executor
    resumed = ResumedRequest(
        request.request_id,
        list(request.prompt_token_ids or ()),
        request.mm_features,
        request.sampling_params,
        request.lora_request,
        list(token_ids),
    )
    # Before queueing, so that an error here leaves no request in the queue without a record.
    executor.collective_rpc("add_record", args=(resumed,))
    try:
        core.add_request(request, wave)
    except BaseException:
        executor.collective_rpc("drop_record", args=(request.request_id,))
        raise
    # If the request left this engine a step ago, the worker has not processed its end yet, and
    # would drop the new record when needed.
    scheduler: Any = core.scheduler
    scheduler.finished_req_ids.discard(request.request_id)
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def after_grammar(grammars: EngineGrammars, request: Request) -> bool:
    """Return whether a request whose grammar has been compiled can start.

    A resumed request's grammar first takes the tokens of the answer after the reasoning, beside the
    steps.
    """
    if not request.num_preemptions or not request.num_output_tokens:
        return True
    if not grammars.take_up(request):
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        return False
    request.status = RequestStatus.PREEMPTED
    return True
