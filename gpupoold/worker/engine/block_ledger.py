"""vLLM's block pool for the KV memory.

Uses ``BlockPool.touch/free_blocks/evict_blocks``, and replaces its ``free_block_queue`` before the
first request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from gpupoold.memory.extent_index import ExtentIndex


class WatchedFreeQueue(FreeKVCacheBlockQueue):
    """vLLM's list of free blocks, which notifies a watcher of blocks that leave and return.

    A block is in the list exactly while it has no reference.
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
