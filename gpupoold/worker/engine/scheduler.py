"""vLLM's scheduler for a model with partly offloaded KV (vLLM's ``scheduler_cls``).

Requests with blocks that are not on the device skip a step, as requests beyond vLLM's token budget
do; other requests continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from gpupoold.memory.kv import KvMemory
from gpupoold.system.activity import WORKER
from gpupoold.wire.messages import DraftCounts
from gpupoold.worker.engine import block_demand
from gpupoold.worker.engine.block_demand import BlockDemand, ComputedKv, StepLimits
from gpupoold.worker.engine.grammars import EngineGrammars
from gpupoold.worker.engine.prefixes import StoredPrefixes
from gpupoold.worker.engine.vllm_process import ResumedRequest

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


# Statuses of waiting requests that wait for nothing but their turn, or for a grammar.
_STARTABLE = (
    RequestStatus.WAITING,
    RequestStatus.PREEMPTED,
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
)
# Limit of a step with a prompt of which log-probabilities are wanted: their logits and the sorting
# add two thirds to the time of the tokens (a model of 10 MB on an emulated device).
_LOGPROB_TOKENS = 512
# Longest wait of an isolated request for other threads of the process to be idle.
_MAX_PUT_OFF_S = 1.0


class PooledScheduler(Scheduler):
    """A scheduler that knows which blocks are on the device, from ``kv``.

    ``prefixes``, if set, has KV of ended requests for new ones; ``grammars``, if set, says whose
    grammars are too costly for a common step.
    ``alone`` is the only request that may run, if set. ``isolated`` requests share no step with
    others, see ``take_turns``; ``name`` is the model's name for the activity page. ``chunk_tokens``
    limits the next step, if set. While ``is_held``, no step is scheduled. ``num_updates`` counts
    steps with known tokens; ``was_decode`` is True if the last step only decoded. ``clock`` returns
    seconds. ``drafts`` counts speculative decoding since the last ``take_drafts``.
    """

    prefixes: StoredPrefixes | None = None
    grammars: EngineGrammars | None = None
    running: list[Request]
    max_num_running_reqs: int
    max_num_active_reqs: int
    max_num_scheduled_tokens: int
    num_spec_tokens: int
    num_lookahead_tokens: int
    num_waiting_for_streaming_input: int
    scheduler_reserve_full_isl: bool
    deferred_waiting: set[Request]
    _inflight_prefills: set[Request]  # with a part of their prompt to compute

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv: KvMemory | None = None
        self.clock: Callable[[], float] = time.monotonic
        self.name = ""
        self.alone: str | None = None
        self.isolated: dict[str, None] = {}  # in the order of the next steps
        self._on_trial: str | None = None
        self._isolated_s = 0.0  # time of the last step of an isolated request
        self._with_logprobs: set[str] = set()  # requests whose prompts' log-probabilities are due
        self.chunk_tokens: int | None = None
        self.is_held = False
        self.num_updates = 0
        self.was_decode = False
        self.drafts = DraftCounts()
        self._demand: BlockDemand | None = None
        self._answer_blocks: int | None = None
        self._was_idle = False  # nothing was scheduled in the last step

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step as vLLM does, without running requests that may not run."""
        limit = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = self._step_tokens()
        try:
            output = self._schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = limit
        self._was_idle = not output.num_scheduled_tokens
        if self.prefixes is not None and self.prefixes.holds_requests:
            self.prefixes.release_started()
        WORKER.begin_step(self.name, list(output.num_scheduled_tokens))
        return output

    def add_request(self, request: Request) -> None:
        """Add a request as vLLM does."""
        sampling = request.sampling_params
        if sampling is not None and sampling.prompt_logprobs is not None:
            self._with_logprobs.add(request.request_id)
        super().add_request(request)

    def has_requests(self) -> bool:
        """Return whether there are requests; False while ``is_held``."""
        return not self.is_held and super().has_requests()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> dict[int, EngineCoreOutputs]:
        self.num_updates += 1
        num_requests = len(scheduler_output.num_scheduled_tokens)
        num_drafted = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        num_others = scheduler_output.total_num_scheduled_tokens - num_drafted
        is_one_each = num_others == num_requests > 0
        self.was_decode = is_one_each and not scheduler_output.scheduled_new_reqs
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Count a request's draft in ``drafts``; vLLM's own statistics are off."""
        num_invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
        if num_draft_tokens > num_invalid:
            draft = DraftCounts(1, num_draft_tokens - num_invalid, num_accepted_tokens)
            self.drafts = self.drafts.plus(draft)
        return None

    def take_drafts(self) -> DraftCounts | None:
        """Return the counts since the last call, None without drafts."""
        if not self.drafts.num_drafts:
            return None
        drafts, self.drafts = self.drafts, DraftCounts()
        return drafts

    def isolate(self, request_id: str) -> None:
        """Run a request, present or future, only in steps without other requests."""
        self.isolated[request_id] = None

    def end_isolation(self, request_id: str) -> None:
        """Run a request in steps with other requests again; no effect if not isolated."""
        self.isolated.pop(request_id, None)
        self._on_trial = None

    def take_turns(self, *, may_isolate: bool) -> None:
        """Choose the next step's requests: one isolated request, or all others, alternately.

        If ``may_isolate`` is false, other requests, if any, run first for up to a second.
        """
        for request_id in [
            request_id for request_id in self.isolated if request_id not in self.requests
        ]:
            del self.isolated[request_id]
        was_isolated, self._on_trial = self._on_trial is not None, None
        if not self.isolated:
            return
        now_s = self.clock()
        has_waited = now_s - self._isolated_s > _MAX_PUT_OFF_S
        has_others = len(self.requests) > len(self.isolated)
        if has_others and (was_isolated or not (may_isolate or has_waited)):
            return
        self._isolated_s = now_s
        self._on_trial = next(iter(self.isolated))
        self.isolated[self._on_trial] = self.isolated.pop(self._on_trial)  # to the end of the line

    def attach(self, request: Request, blocks: Sequence[int], num_tokens: int) -> bool:
        """Give a new request the KV of its first ``num_tokens`` tokens, in ``blocks``.

        The request takes over the references of the blocks, which are in the order of
        ``computed_kv``. Returns False without a change if the KV does not suit the request.
        """
        spans = block_demand.spans(self._managers, num_tokens)
        fits = len(blocks) == sum(map(len, spans)) and 0 < num_tokens < request.num_tokens
        if not fits or request.request_id in self.requests:
            return False
        block_demand.put(self._managers, request.request_id, spans, blocks)
        # vLLM's queue of requests that wait with KV is for a KV connector, but needs none.
        request.num_computed_tokens = num_tokens
        if request.prefill_stats is not None:
            request.prefill_stats.set(request.num_prompt_tokens, 0, 0)
        return True

    def detach(self, request: Request) -> None:
        """Take the KV away from a request that ``attach`` has changed and vLLM has refused."""
        self.kv_cache_manager.free(request)

    def computed_kv(self, request: Request) -> ComputedKv:
        """Return the blocks that a request needs to continue elsewhere; no step is under way.

        Returns no blocks if the KV alone does not suffice.
        """
        num_tokens = request.num_computed_tokens
        if not 0 < num_tokens < request.num_tokens or not _is_only_kv(request):
            return ComputedKv([], 0)
        tables = self.kv_cache_manager.get_block_ids(request.request_id)
        blocks = block_demand.take(self._managers, tables, num_tokens)
        return ComputedKv(blocks, num_tokens if blocks else 0)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Reset as vLLM does; with ``reset_running_requests`` no request has KV afterwards."""
        if reset_running_requests:
            if self.prefixes is not None:
                self.prefixes.drop()
                self.prefixes.drop_ended()
            for request in list(self.kv_holding_waiting):
                self.kv_holding_waiting.remove_request(request)
                self.kv_cache_manager.free(request)
                request.num_computed_tokens = 0
                self.waiting.prepend_request(request)
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def num_wanted_blocks(self) -> int:
        """Return an upper bound of the blocks that the next step may allocate."""
        num_slots = self.max_num_active_reqs - len(self.running)
        limits = self._limits(num_slots - self.num_waiting_for_streaming_input)
        wanted = self._block_demand.of_running(self.running, limits)
        if not (self.waiting or self.kv_holding_waiting) or limits.num_slots <= 0:
            return wanted
        watermark: int = self.kv_cache_manager.watermark_blocks
        waiting, prefixes = self._next_waiting(), self.prefixes
        if prefixes is None:
            return wanted + watermark + self._block_demand.of_waiting(waiting, limits)
        cached = prefixes.num_cached_tokens
        return wanted + watermark + self._block_demand.of_waiting(waiting, limits, cached)

    def lacks_blocks(self, num_free: int) -> bool:
        """Return whether running requests may need more blocks than are free."""
        return self._block_demand.of_running(self.running, self._limits(0)) > num_free

    def num_blocks_of_answers(self) -> int | None:
        """Return the most blocks of a step that only continues answers, at little cost.

        None if prompts may be in the step.
        """
        if len(self.requests) > len(self.running) or self._inflight_prefills:
            return None
        if self._answer_blocks is None:
            self._answer_blocks = self._block_demand.of_an_answer(self._limits(0))
        return self._answer_blocks * len(self.running)

    @property
    def _block_demand(self) -> BlockDemand:
        if self._demand is None:
            self._demand = BlockDemand(self._managers)
        return self._demand

    def _limits(self, num_slots: int) -> StepLimits:
        return StepLimits(
            budget=self._step_tokens(),
            num_slots=num_slots,
            num_each=1 + self.num_spec_tokens,
            num_lookahead=self.num_lookahead_tokens,
            reserves_prompts=self.scheduler_reserve_full_isl,
        )

    def _next_waiting(self) -> Iterator[tuple[Request, bool]]:
        """Yield waiting requests that the next step may start, and whether it will try to."""
        is_sure = not self._is_restricted and not self._was_idle
        for request in chain(self.kv_holding_waiting, self.waiting):
            if request.status in _STARTABLE:
                yield request, is_sure and request not in self.deferred_waiting

    def _step_tokens(self) -> int:
        limit = self.max_num_scheduled_tokens
        # Models with attention in both directions prefill each prompt in one step.
        if not self.scheduler_config.enable_chunked_prefill:
            return limit
        chunk_tokens = limit if self.chunk_tokens is None else self.chunk_tokens
        if self._with_logprobs and self._wants_prompt_logprobs():
            chunk_tokens = min(chunk_tokens, _LOGPROB_TOKENS)
        # At least each answer with its draft, and one more.
        return min(limit, max(chunk_tokens, len(self.running) * (1 + self.num_spec_tokens) + 1))

    def _wants_prompt_logprobs(self) -> bool:
        known = map(self.requests.get, self._with_logprobs)
        self._with_logprobs = {
            request.request_id
            for request in known
            if request is not None and request.num_computed_tokens < request.num_prompt_tokens
        }
        return bool(self._with_logprobs)

    def _schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        everybody, limits = self.running, (self.max_num_running_reqs, self.max_num_active_reqs)
        out = set[str]()
        if self._is_restricted:
            out = {request.request_id for request in everybody if not self._may_run(request)}
        if self.grammars is not None:
            may_run = (request for request in everybody if request.request_id not in out)
            out |= self.grammars.put_off(may_run if out else everybody)
        if self.lora_config is not None:
            out |= self._without_slot(out, self.lora_config.max_loras)
        if not out:
            return super().schedule(*args, **kwargs)
        self.running = [request for request in everybody if request.request_id not in out]
        self.max_num_running_reqs -= len(out)
        self.max_num_active_reqs -= len(out)
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_running_reqs, self.max_num_active_reqs = limits
            # Old requests in their order, then new requests: vLLM preempts from the end.
            ran = {request.request_id: request for request in self.running}
            old = [
                request
                for request in everybody
                if request.request_id in out or request.request_id in ran
            ]
            new = ran.keys() - {request.request_id for request in everybody}
            self.running = [
                *old,
                *(request for request in self.running if request.request_id in new),
            ]

    def can_schedule(self) -> bool:
        """Return whether a request could run now."""
        with_kv = chain(self.running, self.kv_holding_waiting)
        if any(self._is_on_device(request) for request in with_kv):
            return True
        if self.prefixes is None or not self.prefixes.holds_requests:
            return bool(self.waiting)
        return any(map(self.prefixes.may_start, self.waiting))

    def blocks_under_way(self) -> Iterator[int]:
        """Yield blocks of the running requests, oldest first; then of requests that wait."""
        for request in chain(self.running, self.kv_holding_waiting):
            yield from self._blocks(request)
        if self.prefixes is not None:
            yield from self.prefixes.blocks()

    @property
    def _is_restricted(self) -> bool:
        is_whole = self.kv is None or self.kv.is_whole
        if not is_whole or self.alone is not None or self.isolated:
            return True
        return self.prefixes is not None and self.prefixes.holds_requests

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Hold a waiting request whose KV or cached prefix is not on the device."""
        is_waiting = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        if not super()._handle_blocked_waiting_request(request):
            return False
        if is_waiting and not after_grammar(self.structured_output_manager, request):
            return False
        if self._sits_out(request.request_id):
            return False
        if self.prefixes is not None and not self.prefixes.may_start(request):
            return False
        if self.kv is None or self.kv.is_whole:
            return True
        if request.num_computed_tokens:
            return self._is_on_device(request)
        hit = self.kv_cache_manager.get_computed_blocks(request)[0]
        return self.kv.is_on_device(block for group in hit.get_block_ids() for block in group)

    def _free_blocks(self, request: Request) -> None:
        """Free the blocks of an ended request, which are kept for later requests first."""
        if self.prefixes is not None:
            self.prefixes.end(request)
        super()._free_blocks(request)

    def _without_slot(self, out: Collection[str], num_slots: int) -> set[str]:
        """Return running requests beyond the adapters of one step, the newest.

        vLLM counts the adapters of a step, and starts no request with one more adapter. While some
        requests are ``out`` of a step, others may start, so that all together use more adapters.
        """
        used, without = set[int](), set[str]()
        for request in self.running:
            if request.lora_request is None or request.request_id in out:
                continue
            adapter = request.lora_request.lora_int_id
            if adapter in used or len(used) < num_slots:
                used.add(adapter)
            else:
                without.add(request.request_id)
        return without

    def _may_run(self, request: Request) -> bool:
        return not self._sits_out(request.request_id) and self._is_on_device(request)

    def _sits_out(self, request_id: str) -> bool:
        alone = self.alone or self._on_trial
        return request_id in self.isolated if alone is None else request_id != alone

    def _is_on_device(self, request: Request) -> bool:
        return self.kv is None or self.kv.is_on_device(self._blocks(request))

    @property
    def _managers(self) -> Sequence[Any]:
        managers: Sequence[Any] = self.kv_cache_manager.coordinator.single_type_managers
        return managers

    def _blocks(self, request: Request) -> list[int]:
        groups = self.kv_cache_manager.get_block_ids(request.request_id)
        return [block for group in groups for block in group]


class AsyncPooledScheduler(PooledScheduler, AsyncScheduler):
    """A pooled scheduler for steps that begin before the previous step's tokens are known."""


def _is_only_kv(request: Request) -> bool:
    """Return whether KV is all that an engine has computed for a request so far.

    Until the first token, an engine also collects logprobs of the prompt, or a pooled answer.
    """
    sampling = request.sampling_params
    if sampling is None:
        return False
    return request.num_output_tokens > 0 or sampling.prompt_logprobs is None


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

    The KV is recomputed from prompt and tokens, as in vLLM after a preemption. This module creates
    the state that a preempted request has in an engine's process: the worker's record, the state of
    the random generator, and the grammar's position.
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
