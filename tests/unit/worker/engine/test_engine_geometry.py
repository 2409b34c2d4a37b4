"""The rows of KV buffers in vLLM's layouts, from its own configurations of layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

from vllm.v1.kv_cache_interface import KVCacheTensor

from gpupoold.memory.kv_extents import KvRow
from gpupoold.worker.engine.block_demand import geometry_of

NUM_BLOCKS = 8
SMALL, LARGE = 4096, 8192


def rows(*tensors: KVCacheTensor) -> tuple[KvRow, ...]:
    config: Any = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_tensors=tensors)
    geometry = geometry_of(config, page_bytes=4096)
    assert geometry.total_bytes == tensors[0].size
    return geometry.rows


def test_groups_share_the_rows_of_layers() -> None:
    """A block is of one group at a time; the second group has one layer less."""
    size = 2 * NUM_BLOCKS * SMALL
    region = NUM_BLOCKS * SMALL
    groups = [
        KVCacheTensor(size, ["a", "b"], layer_stride=region, block_stride=SMALL),
        KVCacheTensor(size, ["c"], layer_stride=region, block_stride=SMALL),
    ]
    assert rows(*groups) == (KvRow(0, SMALL, SMALL), KvRow(region, SMALL, SMALL))


def test_layers_of_several_sizes_in_a_block_are_one_row() -> None:
    block = 2 * SMALL + LARGE
    tensors = [
        KVCacheTensor(NUM_BLOCKS * block, ["a", "b"], layer_stride=SMALL, block_stride=block),
        KVCacheTensor(NUM_BLOCKS * block, ["c"], LARGE, block_stride=block, offset=2 * SMALL),
    ]
    assert rows(*tensors) == (KvRow(0, block, block),)
