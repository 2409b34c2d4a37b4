"""vLLM's scheduler for a model whose KV may be partly away (vLLM's ``scheduler_cls`` option).

Requests with blocks that are not on the device sit a step out, as requests do for which
vLLM's token budget does not suffice; the others go on.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from gpupoold.instance.resume import after_grammar
from gpupoold.memory.kv import KvMemory


class PooledScheduler(Scheduler):
    """``kv`` knows what is on the device; ``alone`` is the one request that may run, if any."""

    running: list[Request]
    max_num_running_reqs: int
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv: KvMemory | None = None
        self.alone: str | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's step, without the requests under way that may not run."""
        if not self._is_restricted:
            return super().schedule(*args, **kwargs)
        everybody, limits = self.running, (self.max_num_running_reqs, self.max_num_active_reqs)
        out = {request.request_id for request in everybody if not self._may_run(request)}
        self.running = [one for one in everybody if one.request_id not in out]
        self.max_num_running_reqs -= len(out)
        self.max_num_active_reqs -= len(out)
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_running_reqs, self.max_num_active_reqs = limits
            # In the old order, then who is new: vLLM preempts the last ones.
            ran = {request.request_id: request for request in self.running}
            old = [one for one in everybody if one.request_id in out or one.request_id in ran]
            new = ran.keys() - {one.request_id for one in everybody}
            self.running = [*old, *(one for one in self.running if one.request_id in new)]

    def can_schedule(self) -> bool:
        """Whether a request could run now."""
        return bool(len(self.waiting)) or any(self._may_run(one) for one in self.running)

    def blocks_under_way(self) -> list[int]:
        """Blocks of the running requests, those that came first first."""
        return [block for request in self.running for block in self._blocks(request)]

    @property
    def _is_restricted(self) -> bool:
        is_whole = self.kv is None or self.kv.is_whole
        return not is_whole or self.alone is not None

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """A waiting request whose cached prefix is not on the device waits for it."""
        is_waiting = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        if not super()._handle_blocked_waiting_request(request):
            return False
        if is_waiting:
            after_grammar(request)
        if self.alone not in (None, request.request_id):
            return False
        if self.kv is None or self.kv.is_whole:
            return True
        hit = self.kv_cache_manager.get_computed_blocks(request)[0]
        return self.kv.is_here(block for group in hit.get_block_ids() for block in group)

    def _may_run(self, request: Request) -> bool:
        if self.alone not in (None, request.request_id):
            return False
        return self.kv is None or self.kv.is_here(self._blocks(request))

    def _blocks(self, request: Request) -> list[int]:
        groups = self.kv_cache_manager.get_block_ids(request.request_id)
        return [block for group in groups for block in group]
