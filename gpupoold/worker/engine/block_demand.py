"""An upper bound of the blocks that a scheduler's next step may take from the free list.

vLLM schedules at most a *budget* of tokens in a step, first for running requests and then for
waiting requests in their order, and starts at most as many requests as there are free slots. KV is
backed for this many blocks, not for the whole queue. Too low a bound for a waiting request delays
the request by a step; for a running request vLLM would preempt, so that bound is never too low.

``managers`` are ``KVCacheCoordinator.single_type_managers``, one per KV cache group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from gpupoold.memory.kv_extents import ExtentIndex, KvGeometry, KvRow

# A step writes a state to a new block, and may keep two earlier states for the prefix cache.
_MAX_STATE_BLOCKS = 3

_NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of vLLM's next step."""

    budget: int
    """Tokens of all requests together."""
    num_slots: int
    """Requests that may start."""
    num_each: int
    """Tokens of an answer: the next token and its draft."""
    num_lookahead: int
    """Tokens after these, or after a part of a prompt, that the drafter needs slots for."""
    reserves_prompts: bool
    """True if a request starts only if its whole prompt has free blocks."""


class BlockDemand:
    """The bound for the groups of one engine."""

    def __init__(self, managers: Sequence[Any]) -> None:
        self._num_groups = len(managers)
        attention = [manager for manager in managers if not _has_states(manager)]
        self._states = [manager for manager in managers if _has_states(manager)]
        # Groups with the same block size need the same blocks, except for a smaller window.
        self._groups = Counter(
            (manager.block_size, manager.max_admission_blocks_per_request) for manager in attention
        )
        self._sizes = Counter(manager.block_size for manager in attention)

    def of_an_answer(self, limits: StepLimits) -> int:
        """Return the most blocks that a running answer may take, after its prompt."""
        ahead = limits.num_each + limits.num_lookahead
        blocks = sum(count * -(-ahead // size) for size, count in self._sizes.items())
        return blocks + sum(map(_most_state_blocks, self._states))

    def of_running(self, requests: Sequence[Request], limits: StepLimits) -> int:
        """Return the most blocks that running requests may take."""
        ahead = limits.num_each + limits.num_lookahead
        answers, chunks = list[int](), list[Request]()
        for request in requests:
            if request.is_prefill_chunk:
                chunks.append(request)
            else:
                answers.append(request.num_computed_tokens)
        total = 0
        for size, count in self._sizes.items():
            num_crossing = sum(1 for computed in answers if -computed % size < ahead)
            total += count * num_crossing * -(-ahead // size)
        # A state's block is new at the boundary of a block; earlier states may be kept then.
        total += sum(
            _most_state_blocks(manager)
            for manager in self._states
            for computed in answers
            if -computed % manager.block_size < ahead
        )
        return total + self._of_chunks(chunks, limits)

    def of_waiting(
        self,
        requests: Iterable[tuple[Request, bool]],
        limits: StepLimits,
        num_cached_tokens: Callable[[Request], int] = lambda request: 0,
    ) -> int:
        """Return the most blocks that requests may take that wait, in this order.

        The flag with a request is False if vLLM may pass over the request: the budget is then not
        counted as spent. ``num_cached_tokens`` returns the tokens of a request whose blocks are
        kept in the prefix cache.
        """
        left, num_slots, taken, most = limits.budget, limits.num_slots, 0, 0
        for request, starts in requests:
            if num_slots <= 0 or left <= 0:
                break
            num_slots -= 1
            computed = request.num_computed_tokens or num_cached_tokens(request)
            wanted = max(1, request.num_tokens_with_spec - computed)
            now = min(wanted, left)  # vLLM may fill up one token to ``num_each``
            part = self._of_tokens(computed, max(now, limits.num_each) + limits.num_lookahead)
            if limits.reserves_prompts and now < wanted:
                most = max(most, taken + self._of_tokens(computed, wanted))
            taken += part
            if starts:
                left -= now
        # A prefix that ends inside of a block is copied to one more block.
        return max(most, taken) + (self._num_groups if taken else 0)

    def _of_chunks(self, requests: Sequence[Request], limits: StepLimits) -> int:
        """Return the most blocks that running requests may take for parts of their prompts."""
        if not requests:
            return 0
        each = 0
        for request in requests:
            computed = request.num_computed_tokens
            wanted = min(limits.budget, max(1, request.num_tokens_with_spec - computed))
            each += self._of_tokens(computed, wanted + limits.num_lookahead)
        # All together compute no more than the budget.
        together = sum(
            count
            * (-(-limits.budget // size) + len(requests) * (1 - -limits.num_lookahead // size))
            for (size, _), count in self._groups.items()
        )
        together += len(requests) * sum(map(_most_state_blocks, self._states))
        return min(each, together)

    def _of_tokens(self, computed: int, num_tokens: int) -> int:
        """Return the most blocks for ``num_tokens`` of a request after ``computed`` tokens."""
        total = 0
        for (size, cap), count in self._groups.items():
            blocks = -(-(computed + num_tokens) // size) - -(-computed // size)
            total += count * (blocks if cap is None else min(blocks, cap))
        for manager in self._states:
            most = 1 + -(-num_tokens // manager.block_size)
            total += min(most, _MAX_STATE_BLOCKS) + manager.num_speculative_blocks
        return total


def _has_states(manager: Any) -> bool:
    return getattr(manager, "num_speculative_blocks", None) is not None


def _most_state_blocks(manager: Any) -> int:
    return _MAX_STATE_BLOCKS + int(manager.num_speculative_blocks)


class WatchedFreeQueue(FreeKVCacheBlockQueue):
    """vLLM's list of free blocks, which notifies a watcher of blocks that leave and return.

    A block is in the list exactly while it has no reference.

    Uses ``BlockPool.touch/free_blocks/evict_blocks``, and replaces its ``free_block_queue`` before
    the first request.
    """

    def __init__(self, blocks: list[KVCacheBlock], watcher: ExtentIndex) -> None:
        super().__init__(blocks)
        self._watcher = watcher

    def popleft(self) -> KVCacheBlock:
        block = super().popleft()
        self._watcher.taken([block.block_id])
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        blocks = super().popleft_n(n)
        self._watcher.taken([block.block_id for block in blocks])
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        super().remove(block)
        self._watcher.taken([block.block_id])

    def append(self, block: KVCacheBlock) -> None:
        super().append(block)
        self._watcher.freed([block.block_id])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        super().append_n(blocks)
        self._watcher.freed([block.block_id for block in blocks])

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        super().prepend_n(blocks)
        self._watcher.freed([block.block_id for block in blocks])


class BlockPoolLedger:
    """vLLM's block pool as the KV memory's ``BlockLedger``, through the pool's public methods."""

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool

    def watch(self, watcher: ExtentIndex) -> None:
        free = [block for block in self._pool.blocks if not block.is_null]
        assert self.num_free == len(free), "blocks are in use before there are requests"
        self._pool.free_block_queue = WatchedFreeQueue(free, watcher)

    def hold(self, block_ids: Sequence[int]) -> None:
        self._pool.evict_blocks(set(block_ids))
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def keep(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def give(self, block_ids: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])

    def live(self, block_ids: Iterable[int]) -> list[int]:
        blocks = self._pool.blocks
        return [block_id for block_id in block_ids if blocks[block_id].ref_cnt > 0]

    @property
    def num_free(self) -> int:
        return int(self._pool.get_num_free_blocks())


class ComputedKv(NamedTuple):
    """The blocks with KV and state of the first ``num_tokens`` tokens, group by group.

    vLLM keeps one table of blocks per *KV cache group* and request: entry ``i`` has tokens ``i *
    size`` to ``(i + 1) * size - 1``, where ``size`` is the group's block size. Which entries are
    needed after ``num_tokens`` computed tokens depends on the group:

    - full attention and MLA: all entries, the last one perhaps unfinished;
    - sliding window, chunked local attention: the entries of the window, earlier ones are null
      blocks;
    - state (Mamba, Gated DeltaNet, short convolutions): the entry of the last token, whose block
      has the state after exactly ``num_tokens`` tokens.

    vLLM's managers of the groups compute the number of entries that are not needed. ``managers``
    are ``KVCacheCoordinator.single_type_managers``.
    """

    blocks: list[int]
    num_tokens: int


def spans(managers: Sequence[Any], num_tokens: int) -> list[range]:
    """Return for each group the needed entries of a request's table."""
    return [
        range(
            min(manager.get_num_skipped_tokens(num_tokens), num_tokens) // manager.block_size,
            -(-num_tokens // manager.block_size),
        )
        for manager in managers
    ]


def take(managers: Sequence[Any], tables: Sequence[list[int]], num_tokens: int) -> list[int]:
    """Return the needed blocks of a request; none if a table has other entries than expected.

    With speculative decoding, the block of a state depends on the accepted tokens.
    """
    if any(getattr(manager, "num_speculative_blocks", 0) for manager in managers):
        return []
    blocks: list[int] = []
    for table, span in zip(tables, spans(managers, num_tokens), strict=True):
        needed = table[span.start : span.stop]
        if len(needed) < len(span) or _NULL_BLOCK in needed:
            return []
        blocks += needed
    return blocks


def put(
    managers: Sequence[Any], request_id: str, entries: Sequence[range], blocks: Sequence[int]
) -> None:
    """Make ``blocks`` the ``entries`` of a new request's tables, group by group."""
    rest = iter(blocks)
    for manager, span in zip(managers, entries, strict=True):
        pool = manager.block_pool
        table = manager.req_to_blocks[request_id]
        table += [pool.null_block] * span.start
        table += [pool.blocks[next(rest)] for _ in span]


def geometry_of(config: KVCacheConfig, page_bytes: int) -> KvGeometry:
    """Return the geometry of the KV; of one block of one page for a model without KV."""
    if not config.kv_cache_tensors:
        return KvGeometry(1, page_bytes, (KvRow(0, page_bytes, page_bytes),))
    rows: set[KvRow] = set()
    for tensor in config.kv_cache_tensors:
        if tensor.layer_stride < tensor.block_stride:
            # Blocks outermost: one piece per block, also if layers of several kinds share the
            # block, each kind at its own offset in the block.
            rows.add(KvRow(0, tensor.block_stride, tensor.block_stride))
            continue
        for layer in range(len(tensor.layers)):
            start = tensor.offset + layer * tensor.layer_stride
            rows.add(KvRow(start, tensor.block_stride, tensor.block_stride))
    ordered = sorted(rows, key=lambda row: row.offset)
    return KvGeometry(config.num_blocks, page_bytes, tuple(ordered))
