"""A request continues elsewhere with the blocks that its next tokens need, in vLLM's own tables."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("vllm", reason="the engine is not installed")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from gpupoold.worker.engine import block_demand
from gpupoold.worker.engine.scheduler import PooledScheduler

NUM_BLOCKS = 400
MAX_LEN = 512
BLOCK = 16
WINDOW = 40
CHUNK = 48
MAX_STEP = 100
_ATTENTION: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": torch.float32,
}


def state(mode: str, block_size: int) -> MambaSpec:
    return MambaSpec(
        block_size=block_size, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )


FULL = FullAttentionSpec(**_ATTENTION)
SLIDING = SlidingWindowSpec(**_ATTENTION, sliding_window=WINDOW)
CHUNKED = ChunkedLocalAttentionSpec(**_ATTENTION, attention_chunk_size=CHUNK)
KINDS: dict[str, tuple[list[Any], bool]] = {
    "full": ([FULL], True),
    "mla": ([MLAAttentionSpec(**_ATTENTION)], True),
    "sliding": ([SLIDING], True),
    "sliding and full": ([SLIDING, SLIDING, FULL], True),
    "chunked and full": ([CHUNKED, FULL], True),
    "state": ([state("none", MAX_LEN)], False),
    "state and full": ([state("align", BLOCK), FULL, state("align", BLOCK)], True),
}


def needed_tokens(spec: Any, num_tokens: int) -> range:
    """The computed tokens whose KV or state the next token needs."""
    match spec:
        case SlidingWindowSpec():
            return range(max(0, num_tokens - WINDOW + 1), num_tokens)
        case ChunkedLocalAttentionSpec():
            return range(num_tokens // CHUNK * CHUNK, num_tokens)
        case MambaSpec():
            return range(num_tokens - 1, num_tokens)
    return range(num_tokens)


class Engine:
    """An engine's scheduler with vLLM's tables of blocks, which runs one request."""

    def __init__(self, kind: str) -> None:
        self.specs, has_prefixes = KINDS[kind]
        groups = [KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(self.specs)]
        block_size = max(spec.block_size for spec in self.specs)
        made: Any = PooledScheduler.__new__(PooledScheduler)
        made.kv_cache_manager = KVCacheManager(
            KVCacheConfig(NUM_BLOCKS, [], groups),
            MAX_LEN,
            block_size,
            block_size,
            max_in_flight_tokens=MAX_STEP,
            enable_caching=has_prefixes,
        )
        made.running, made.waiting, made.kv_holding_waiting = [], [], deque()
        made.requests, made.kv, made.num_lookahead_tokens = {}, None, 0
        made._demand, made.chunk_tokens, made.max_num_scheduled_tokens = None, None, MAX_STEP
        made.num_spec_tokens = made.num_waiting_for_streaming_input = 0
        made.max_num_active_reqs, made.scheduler_reserve_full_isl = 1, True
        made.scheduler_config = SimpleNamespace(enable_chunked_prefill=True)
        made._with_logprobs = set()
        self.scheduler: Any = made
        self.pool = made.kv_cache_manager.block_pool
        self.num_free = self.pool.get_num_free_blocks()

    def compute(self, request: Request, num_tokens: int) -> None:
        """Give a request blocks for so many more tokens, and compute these."""
        manager, before = self.scheduler.kv_cache_manager, self.pool.get_num_free_blocks()
        self.scheduler.running = [request]
        request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens - 1
        wanted = self.scheduler.num_wanted_blocks()
        manager.new_step_starts()
        assert manager.allocate_slots(request, num_tokens) is not None
        request.num_computed_tokens += num_tokens
        assert before - self.pool.get_num_free_blocks() <= wanted

    def table(self, request: Request) -> tuple[list[bool], ...]:
        """For each group, which entries of the request's table are blocks."""
        tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        spans = block_demand.spans(self.scheduler._managers, request.num_computed_tokens)
        return tuple(
            [bool(block) for block in table[span.start :]]
            for table, span in zip(tables, spans, strict=True)
        )

    def finish(self, request: Request) -> None:
        self.scheduler.kv_cache_manager.free(request)
        assert self.pool.get_num_free_blocks() == self.num_free


def request_of(num_prompt_tokens: int, output: list[int]) -> Request:
    init_none_hash(sha256)
    block_hasher = get_request_block_hasher(BLOCK, sha256)
    sampling = SamplingParams(max_tokens=MAX_LEN)
    request = Request(
        "r", list(range(num_prompt_tokens)), sampling, None, block_hasher=block_hasher
    )
    request.append_output_token_ids(output)
    return request


def run(engine: Engine, request: Request, num_steps: int, chunk: int) -> None:
    """Make steps as vLLM would: chunks of the prompt, then a token each."""
    for _ in range(num_steps):
        num_new = min(chunk, request.num_tokens - request.num_computed_tokens)
        if any(isinstance(spec, MambaSpec) for spec in engine.specs) and num_new > 1:
            num_new = min(num_new, BLOCK - request.num_computed_tokens % BLOCK)
        engine.compute(request, num_new)
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids([request.num_tokens])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(
    num_prompt_tokens=st.integers(1, 200),
    num_steps=st.integers(1, 60),
    num_more=st.integers(1, 40),
    chunk=st.integers(1, MAX_STEP),
)
def test_it_continues_as_if_it_had_stayed(
    kind: str, num_prompt_tokens: int, num_steps: int, num_more: int, chunk: int
) -> None:
    here, there = Engine(kind), Engine(kind)
    request = request_of(num_prompt_tokens, [])
    run(here, request, num_steps, chunk)
    computed = here.scheduler.computed_kv(request)
    num_tokens = request.num_computed_tokens
    assert computed.num_tokens == num_tokens
    check_blocks(here, request, computed.blocks)

    moved = request_of(num_prompt_tokens, list(request.output_token_ids))
    blocks = [block.block_id for block in there.pool.get_new_blocks(len(computed.blocks))]
    assert there.scheduler.attach(moved, blocks, num_tokens)
    assert moved.num_computed_tokens == num_tokens
    for _ in range(num_more):
        run(here, request, 1, chunk)
        run(there, moved, 1, chunk)
        assert there.table(moved) == here.table(request)
        assert moved.num_computed_tokens == request.num_computed_tokens
    here.finish(request)
    there.finish(moved)


def check_blocks(engine: Engine, request: Request, blocks: list[int]) -> None:
    """Check that ``blocks`` are those of the needed tokens, in order, each once."""
    tables = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    wanted: list[int] = []
    for spec, table in zip(engine.specs, tables, strict=True):
        tokens = needed_tokens(spec, request.num_computed_tokens)
        wanted += [table[entry] for entry in dict.fromkeys(t // spec.block_size for t in tokens)]
    assert blocks == wanted
    assert 0 not in blocks
    assert len(set(blocks)) == len(blocks)


class TestKvThatDoesNotSuit:
    def test_of_another_number_of_blocks_or_tokens(self) -> None:
        engine = Engine("sliding and full")
        blocks = [block.block_id for block in engine.pool.get_new_blocks(4)]
        for num_blocks, num_tokens in ((3, 16), (2, 16), (4, 32), (0, 0), (3, -1)):
            request = request_of(32, [])
            fits = engine.scheduler.attach(request, blocks[:num_blocks], num_tokens)
            assert fits == (num_blocks == 3 and num_tokens == 16)
            if fits:
                assert request.num_computed_tokens == 16
                engine.scheduler.detach(request)
            else:
                assert request.num_computed_tokens == 0

    def test_a_request_that_is_there_keeps_its_own(self) -> None:
        engine = Engine("full")
        request = request_of(32, [])
        engine.scheduler.requests["r"] = request
        [block] = engine.pool.get_new_blocks(1)
        assert not engine.scheduler.attach(request_of(32, []), [block.block_id], 16)

    def test_more_is_known_than_kv(self) -> None:
        """Until the first token the engine collects the prompt's logprobs."""
        engine = Engine("full")
        request = request_of(40, [])
        run(engine, request, 1, 20)
        assert engine.scheduler.computed_kv(request).num_tokens == 20
        assert request.sampling_params is not None
        request.sampling_params.prompt_logprobs = 1
        assert engine.scheduler.computed_kv(request).blocks == []
        run(engine, request, 1, 20)
        assert engine.scheduler.computed_kv(request).num_tokens == 40
        request.sampling_params = None
        assert engine.scheduler.computed_kv(request).blocks == []

    def test_a_state_of_drafts_or_a_table_with_holes(self) -> None:
        engine = Engine("state and full")
        request = request_of(40, [])
        run(engine, request, 1, 16)
        assert len(engine.scheduler.computed_kv(request).blocks) == 3
        engine.scheduler._managers[0].num_speculative_blocks = 1
        assert engine.scheduler.computed_kv(request).blocks == []
        engine.scheduler._managers[0].num_speculative_blocks = 0
        engine.scheduler._managers[1].req_to_blocks["r"][0] = engine.pool.null_block
        assert engine.scheduler.computed_kv(request) == ([], 0)


def test_requests_that_wait_with_kv_lose_it_with_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resets: list[tuple[Any, ...]] = []

    def reset(_: Scheduler, *given: bool) -> bool:
        resets.append(given)
        return True

    monkeypatch.setattr(Scheduler, "reset_prefix_cache", reset)
    engine = Engine("sliding and full")
    waiting: Any = engine.scheduler
    waiting.waiting = Queue()
    waiting.kv_holding_waiting = Queue()
    request = request_of(40, [])
    run(engine, request, 1, 20)
    waiting.kv_holding_waiting.append(request)
    assert waiting.reset_prefix_cache()
    assert list(waiting.kv_holding_waiting) == [request]
    assert waiting.reset_prefix_cache(reset_running_requests=True)
    assert (list(waiting.kv_holding_waiting), list(waiting.waiting)) == ([], [request])
    assert request.num_computed_tokens == 0
    assert engine.pool.get_num_free_blocks() == engine.num_free
    assert resets == [(False, False), (True, False)]


class Queue(deque[Any]):
    """A queue with the names of vLLM's."""

    def remove_request(self, request: Any) -> None:
        self.remove(request)

    def prepend_request(self, request: Any) -> None:
        self.appendleft(request)
