"""KV backed for the next step alone: vLLM's scheduler plans the same steps as with all blocks."""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("vllm", reason="the engine is not installed")

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from gpupoold.worker.engine.block_demand import BlockPoolLedger
from gpupoold.worker.engine.scheduler import AsyncPooledScheduler, PooledScheduler

BLOCK = 16
NUM_BLOCKS = 4000
MAX_LEN = 512
MAX_SEQS = 12
BUDGET = 96
_ATTENTION: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**_ATTENTION)
SLIDING = SlidingWindowSpec(**_ATTENTION, sliding_window=40)


def state(mode: str, block_size: int) -> MambaSpec:
    return MambaSpec(
        block_size=block_size, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )


KINDS: dict[str, list[Any]] = {
    "full": [FULL],
    "sliding and full": [SLIDING, FULL],
    "state and full": [state("none", MAX_LEN), FULL],
    "aligned state and full": [state("align", BLOCK), FULL],
}


class NoWatcher:
    def taken(self, block_ids: object) -> None:
        pass

    def freed(self, block_ids: object) -> None:
        pass


@functools.cache
def config_of(path: Path) -> VllmConfig:
    arguments = EngineArgs(
        model=str(path),
        enforce_eager=True,
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=BUDGET,
        block_size=32,
    )
    return arguments.create_engine_config()


class Engine:
    """A scheduler whose steps have random tokens; ``has_all`` without blocks held back."""

    def __init__(
        self,
        path: Path,
        kind: str,
        num_drafted: int = 0,
        *,
        is_async: bool,
        has_all: bool,
        has_prefixes: bool = False,
    ) -> None:
        config = config_of(path)
        config.cache_config.enable_prefix_caching = has_prefixes
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        config.cache_config.mamba_cache_mode = "align" if "aligned" in kind else "none"
        groups = [KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(KINDS[kind])]
        scheduler_class = AsyncPooledScheduler if is_async else PooledScheduler
        size = max(spec.block_size for spec in KINDS[kind])
        made: Any = scheduler_class(
            config,
            KVCacheConfig(NUM_BLOCKS, [], groups),
            StructuredOutputManager(config),
            size,
            BLOCK,
        )
        made.num_spec_tokens = num_drafted
        made.num_lookahead_tokens = num_drafted
        made._spec_token_placeholders = [-1] * num_drafted
        self.scheduler = made
        self.ledger = BlockPoolLedger(made.kv_cache_manager.block_pool)
        self.ledger.watch(cast(Any, NoWatcher()))
        self._unbacked = deque(range(1, NUM_BLOCKS))
        if has_all:
            self._unbacked.clear()
        self.ledger.hold(list(self._unbacked))
        self._under_way: deque[Any] = deque()
        self._depth = 2 if is_async else 1
        self._num_drafted = num_drafted
        self._has_prefixes = has_prefixes

    @property
    def num_backed(self) -> int:
        return NUM_BLOCKS - 1 - len(self._unbacked)

    def step(self, chunk_tokens: int | None) -> dict[str, int]:
        """Back blocks, plan a step, and process the oldest; return the tokens of the step."""
        self.scheduler.chunk_tokens = chunk_tokens
        wanted = self.scheduler.num_wanted_blocks()
        missing = wanted - self.ledger.num_free
        if self._unbacked and missing > 0:
            self.ledger.give([self._unbacked.popleft() for _ in range(missing)])
        free = self.ledger.num_free
        output = self.scheduler.schedule()
        # A long prefix in free blocks is taken at once, but costs nothing of the step's tokens.
        assert self._has_prefixes or free - self.ledger.num_free <= wanted
        assert not output.preempted_req_ids
        requests = self.scheduler.requests
        sampling = {n for n in output.num_scheduled_tokens if not requests[n].is_prefill_chunk}
        self._under_way.append((output, sampling))
        if len(self._under_way) == self._depth:
            self._process(*self._under_way.popleft())
        return dict(output.num_scheduled_tokens)

    def _process(self, output: Any, sampling: set[str]) -> None:
        ids = list(output.num_scheduled_tokens)
        sampled = [self._sampled(output, name) if name in sampling else [] for name in ids]
        done = ModelRunnerOutput(ids, {name: at for at, name in enumerate(ids)}, sampled)
        self.scheduler.update_from_output(output, done)
        if self._num_drafted and self._depth == 1:
            drafts = [[1] * self._num_drafted for _ in ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def _sampled(self, output: Any, name: str) -> list[int]:
        """The tokens of a request in a step, with as many of its draft as a hash accepts."""
        num_drafted = len(output.scheduled_spec_decode_tokens.get(name, ()))
        number = int(name) * 7 + self.scheduler.current_step * 13
        return [2] * (1 + number % (num_drafted + 1))

    def add(self, name: str, num_tokens: int, max_tokens: int) -> None:
        init_none_hash(sha256)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, 1)
        hasher = get_request_block_hasher(BLOCK, sha256)
        first = int(name) % 3 if self._has_prefixes else int(name)
        tokens = [first * 1000 + at for at in range(num_tokens)]
        self.scheduler.add_request(Request(name, tokens, sampling, None, block_hasher=hasher))

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(seed=st.integers(0, 1 << 32), is_async=st.booleans(), num_drafted=st.sampled_from([0, 0, 3]))
def test_steps_are_those_with_all_blocks(
    tiny_models: dict[str, Path], kind: str, seed: int, is_async: bool, num_drafted: int
) -> None:
    rng = random.Random(seed)
    drafted = 0 if "state" in kind else num_drafted
    path = tiny_models["tiny-llama"]
    tight, free = (
        Engine(path, kind, drafted, is_async=is_async, has_all=has_all) for has_all in (False, True)
    )
    live, names = list[str](), itertools.count()
    for _ in range(rng.randint(1, 120)):
        for _ in range(rng.choice([0, 0, 0, 1, 1, 2, 15])):
            name, length = str(next(names)), rng.choice([1, 5, 31, 32, 33, 90, 300])
            max_tokens = rng.randint(1, 60)
            for engine in (tight, free):
                engine.add(name, length, max_tokens)
            live.append(name)
        if live and rng.random() < 0.1:
            name = live.pop(rng.randrange(len(live)))
            for engine in (tight, free):
                engine.abort(name)
        chunk = rng.choice([None, None, None, 16])
        assert tight.step(chunk) == free.step(chunk)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["full", "sliding and full", "aligned state and full"])
@settings(max_examples=8)
@given(seed=st.integers(0, 1 << 32), is_async=st.booleans())
def test_requests_with_common_prefixes_end(
    tiny_models: dict[str, Path], kind: str, seed: int, is_async: bool
) -> None:
    rng = random.Random(seed)
    path = tiny_models["tiny-llama"]
    tight, free = (
        Engine(path, kind, is_async=is_async, has_all=has_all, has_prefixes=True)
        for has_all in (False, True)
    )
    for name in range(rng.randint(1, 40)):
        length, max_tokens = rng.choice([1, 17, 32, 64, 100, 300]), rng.randint(1, 40)
        for engine in (tight, free):
            engine.add(str(name), length, max_tokens)
    num_steps = []
    for engine in (tight, free):
        num_steps.append(0)
        while engine.scheduler.has_requests() and num_steps[-1] < 2000:
            engine.step(None)
            num_steps[-1] += 1
    assert num_steps[0] <= 1.5 * num_steps[1] + 3
    assert tight.num_backed < NUM_BLOCKS // 2


def test_a_long_queue_asks_for_no_more_than_a_step(tiny_models: dict[str, Path]) -> None:
    engine = Engine(tiny_models["tiny-llama"], "full", is_async=False, has_all=False)
    for name in range(200):
        engine.add(str(name), 300, 16)
    most = 0
    for _ in range(50):
        engine.step(None)
        most = max(most, engine.num_backed)
    # Twelve requests of 316 tokens at a time, and the prompt of the next one.
    assert most <= (MAX_SEQS + 1) * 20
