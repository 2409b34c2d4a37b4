"""vLLM's own block pool tells of every block that comes into use or goes out of it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, cast

from vllm.v1.core.block_pool import BlockPool

from gpupoold.worker.engine.block_demand import BlockPoolLedger

NUM_BLOCKS = 40


class Used:
    """The blocks in use, by what it has been told."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def taken(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            assert block not in self.blocks
            self.blocks.add(block)

    def freed(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            self.blocks.remove(block)


def test_whatever_happens_to_blocks() -> None:
    pool = BlockPool(num_gpu_blocks=NUM_BLOCKS, enable_caching=True, hash_block_size=16)
    ledger, used, rng = BlockPoolLedger(pool), Used(), random.Random(1)
    ledger.watch(cast(Any, used))
    requests: list[list[int]] = []
    held: list[int] = []
    for _ in range(2_000):
        match rng.randrange(6):
            case 0 | 1 if ledger.num_free:
                got = pool.get_new_blocks(rng.randint(1, min(4, ledger.num_free)))
                requests.append([block.block_id for block in got])
            case 2 if requests:
                again = rng.choice(requests)
                pool.touch([pool.blocks[block] for block in again])
                requests.append(again)
            case 3 if requests:
                blocks = requests.pop(rng.randrange(len(requests)))
                pool.free_blocks([pool.blocks[block] for block in reversed(blocks)])
            case 4:
                free = [b for b in range(1, NUM_BLOCKS) if not pool.blocks[b].ref_cnt]
                chosen = rng.sample(free, min(3, len(free)))
                ledger.hold(chosen)
                held += chosen
            case 5 if held:
                ledger.give([held.pop()])
        assert used.blocks == set(ledger.live(range(1, NUM_BLOCKS)))
        assert len(used.blocks) == NUM_BLOCKS - 1 - ledger.num_free
    assert 0 not in used.blocks
