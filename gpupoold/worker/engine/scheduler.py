"""vLLM's scheduler for a model with partly offloaded KV (vLLM's ``scheduler_cls``).

Requests with blocks that are not on the device skip a step, as requests beyond vLLM's token budget
do; other requests continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from gpupoold.memory.kv import KvMemory
from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.wire.messages import DraftCounts
from gpupoold.worker.engine.resume import after_grammar

# Longest wait of an isolated request for other threads of the process to be idle.
_MAX_PUT_OFF_S = 1.0


class PooledScheduler(Scheduler):
    """A scheduler that knows which blocks are on the device, from ``kv``.

    ``alone`` is the only request that may run, if set. ``isolated`` requests share no step with
    others, see ``take_turns``; ``name`` is the model's name for the activity page. ``chunk_tokens``
    limits the next step, if set. While ``is_held``, no step is scheduled. ``num_updates`` counts
    steps with known tokens; ``was_decode`` is True if the last step only decoded. ``clock`` returns
    seconds. ``drafts`` counts speculative decoding since the last ``take_drafts``.
    """

    running: list[Request]
    max_num_running_reqs: int
    max_num_active_reqs: int
    max_num_scheduled_tokens: int
    num_spec_tokens: int
    num_lookahead_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv: KvMemory | None = None
        self.clock: Callable[[], float] = time.monotonic
        self.name = ""
        self.alone: str | None = None
        self.isolated: dict[str, None] = {}  # in the order of the next steps
        self._on_trial: str | None = None
        self._isolated_s = 0.0  # time of the last step of an isolated request
        self.chunk_tokens: int | None = None
        self.is_held = False
        self.num_updates = 0
        self.was_decode = False
        self.drafts = DraftCounts()
        self._attached: dict[str, list[int]] = {}

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step as vLLM does, without running requests that may not run."""
        limit = self.max_num_scheduled_tokens
        # Models with attention in both directions prefill each prompt in one step.
        can_chunk = self.scheduler_config.enable_chunked_prefill
        if self.chunk_tokens is not None and can_chunk:
            # At least each answer with its draft, and one more.
            wanted = max(self.chunk_tokens, len(self.running) * (1 + self.num_spec_tokens) + 1)
            self.max_num_scheduled_tokens = min(limit, wanted)
        try:
            output = self._schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = limit
        WORKER.begin_step(self.name, list(output.num_scheduled_tokens))
        if WORKER.main.phase == ThreadPhase.STEP:
            WORKER.main.clear()
        if self._attached:
            for request in self.running:
                self.release(request.request_id)
        return output

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
        drafts, self.drafts = self.drafts, DraftCounts()
        return drafts if drafts.num_drafts else None

    def num_missing_tokens(self, request: Request) -> int:
        """Return the number of tokens without a KV slot that a request may need in a step."""
        known = request.num_tokens_with_spec + self.num_lookahead_tokens
        return max(0, known - request.num_computed_tokens)

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
        for request_id in [one for one in self.isolated if one not in self.requests]:
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

    def attach(self, request: Request, blocks: list[int]) -> None:
        """Attach ``blocks``, with their references, as the first blocks of a new request."""
        if not blocks:
            return
        pool = self.kv_cache_manager.block_pool
        full = [pool.blocks[block] for block in blocks]
        pool.cache_full_blocks(request, full, 0, len(full), self.block_size, 0)
        self._attached[request.request_id] = blocks

    @property
    def num_attached(self) -> int:
        """Number of blocks attached to requests that wait to run."""
        return sum(map(len, self._attached.values()))

    def full_blocks(self, request: Request) -> list[int]:
        """Return the first blocks of a request that are full and will not be written again.

        Empty unless all layers have full attention with the same list of blocks.
        """
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
            return []
        if request.request_id in self._attached:
            return list(self._attached[request.request_id])
        num_full = min(request.num_computed_tokens, request.num_tokens - 1) // self.block_size
        return self._blocks(request)[:num_full]

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        """Finish requests as vLLM does, and free their attached blocks."""
        finished = super().finish_requests(*args, **kwargs)
        for request in finished:
            self.release(request.request_id)
        return finished

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Reset as vLLM does; no request has KV afterwards."""
        for request_id in list(self._attached):
            self.release(request_id)
        return super().reset_prefix_cache(*args, **kwargs)

    def release(self, request_id: str) -> None:
        """Drop the references to attached blocks: the request has its own or has ended."""
        blocks = self._attached.pop(request_id, None)
        if blocks is None:
            return
        pool = self.kv_cache_manager.block_pool
        pool.free_blocks([pool.blocks[block] for block in reversed(blocks)])
        if self.kv is not None:
            self.kv.discard_dead()

    def _schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        everybody, limits = self.running, (self.max_num_running_reqs, self.max_num_active_reqs)
        out = set[str]()
        if self._is_restricted:
            out = {request.request_id for request in everybody if not self._may_run(request)}
        out |= self._without_slot(out)
        if not out:
            return super().schedule(*args, **kwargs)
        self.running = [one for one in everybody if one.request_id not in out]
        self.max_num_running_reqs -= len(out)
        self.max_num_active_reqs -= len(out)
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_running_reqs, self.max_num_active_reqs = limits
            # Old requests in their order, then new requests: vLLM preempts from the end.
            ran = {request.request_id: request for request in self.running}
            old = [one for one in everybody if one.request_id in out or one.request_id in ran]
            new = ran.keys() - {one.request_id for one in everybody}
            self.running = [*old, *(one for one in self.running if one.request_id in new)]

    def can_schedule(self) -> bool:
        """Return whether a request could run now."""
        waiting = any(self._is_attached_here(one) for one in self.waiting)
        return waiting or any(self._is_on_device(one) for one in self.running)

    def blocks_under_way(self) -> Iterator[int]:
        """Yield blocks of the running requests, oldest first; then attached blocks."""
        for request in self.running:
            yield from self._blocks(request)
        for blocks in self._attached.values():
            yield from blocks

    @property
    def _is_restricted(self) -> bool:
        is_whole = self.kv is None or self.kv.is_whole
        return not is_whole or self.alone is not None or bool(self.isolated)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Hold a waiting request whose cached prefix is not on the device."""
        is_waiting = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        if not super()._handle_blocked_waiting_request(request):
            return False
        if is_waiting:
            after_grammar(self.structured_output_manager, request)
        if self._sits_out(request.request_id):
            return False
        if self.kv is None or self.kv.is_whole:
            return True
        hit = self.kv_cache_manager.get_computed_blocks(request)[0]
        return self.kv.is_on_device(block for group in hit.get_block_ids() for block in group)

    def _is_attached_here(self, request: Request) -> bool:
        """Return whether a waiting request's attached blocks, if any, are on the device."""
        attached = self._attached.get(request.request_id)
        return attached is None or self.kv is None or self.kv.is_on_device(attached)

    def _without_slot(self, out: Collection[str]) -> set[str]:
        """Return running requests beyond the adapters of one step, the newest.

        vLLM counts the adapters of a step, and starts no request with one more adapter. While some
        requests are ``out`` of a step, others may start, so that all together use more adapters.
        """
        if self.lora_config is None:
            return set()
        used, without = set[int](), set[str]()
        for request in self.running:
            if request.lora_request is None or request.request_id in out:
                continue
            adapter = request.lora_request.lora_int_id
            if adapter in used or len(used) < self.lora_config.max_loras:
                used.add(adapter)
            else:
                without.add(request.request_id)
        return without

    def _may_run(self, request: Request) -> bool:
        return not self._sits_out(request.request_id) and self._is_on_device(request)

    def _sits_out(self, request_id: str) -> bool:
        """Return whether the next step excludes a request."""
        alone = self.alone or self._on_trial
        return request_id in self.isolated if alone is None else request_id != alone

    def _is_on_device(self, request: Request) -> bool:
        return self.kv is None or self.kv.is_on_device(self._blocks(request))

    def _blocks(self, request: Request) -> list[int]:
        groups = self.kv_cache_manager.get_block_ids(request.request_id)
        return [block for group in groups for block in group]


class AsyncPooledScheduler(PooledScheduler, AsyncScheduler):
    """A pooled scheduler for steps that begin before the previous step's tokens are known."""
