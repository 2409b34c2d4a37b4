"""Offload and restore of a paused request's KV, with blocks outermost and with layers outermost.

Uses the KV memory without an engine, with a record of blocks like vLLM's.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.gpu.shapes import Shape
from gpupoold.memory.device import AddressRange, Device, Direction
from gpupoold.memory.host import KvHostCache
from gpupoold.memory.kv import KvMemory
from gpupoold.memory.kv_extents import ExtentIndex, KvGeometry, KvRow, Place
from gpupoold.memory.pages import PagePool
from gpupoold.memory.transfers import TransferQueue

BLOCK_TOKENS = 16
LAYOUTS = ("layers_outermost", "blocks_outermost")
_WARM_UP = 1


class CountedBlocks:
    """The account of blocks: how often each is used."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._uses: Counter[int] = Counter()

    def watch(self, watcher: ExtentIndex) -> None:
        """Tell it of every change from now on."""
        self._watcher = watcher

    def hold(self, block_ids: Sequence[int]) -> None:
        """Used once more."""
        self._watcher.taken(block for block in block_ids if not self._uses[block])
        self._uses.update(block_ids)

    keep = hold

    def give(self, block_ids: Sequence[int]) -> None:
        """Used once less."""
        self._uses.subtract(block_ids)
        self._watcher.freed(block for block in block_ids if not self._uses[block])

    def live(self, block_ids: Iterable[int]) -> list[int]:
        """Those that are used."""
        return [block_id for block_id in block_ids if self._uses[block_id] > 0]

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, without the null block."""
        return sum(self._uses[block_id] <= 0 for block_id in range(1, self._num_blocks))


def geometry_of(shape: Shape, layout: str, num_blocks: int, page_bytes: int) -> KvGeometry:
    """Where the bytes of ``num_blocks`` blocks lie in one of the layouts."""
    block_bytes = BLOCK_TOKENS * shape.kv_bytes_per_token
    if layout == "blocks_outermost":
        return KvGeometry(num_blocks, page_bytes, (KvRow(0, block_bytes, block_bytes),))
    row_bytes = block_bytes // shape.num_layers
    rows = (
        KvRow(i * num_blocks * row_bytes, row_bytes, row_bytes) for i in range(shape.num_layers)
    )
    return KvGeometry(num_blocks, page_bytes, tuple(rows))


def used_blocks(num_blocks: int, num_used: int, *, is_scattered: bool) -> list[int]:
    """The blocks of the request: one behind the other, or anywhere among others' blocks."""
    if not is_scattered:
        return list(range(1, num_used + 1))
    return sorted(random.Random(0).sample(range(1, num_blocks), num_used))


def bench_layouts(
    device: Device, shape: Shape, num_blocks: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each layout, with half of the blocks in use.

    Raises:
        OutOfPages, OSError, CudaError: there is too little memory.
    """
    kv_bytes = num_blocks * BLOCK_TOKENS * shape.kv_bytes_per_token
    host = KvHostCache(2 * kv_bytes)
    with contextlib.ExitStack() as undo:
        undo.callback(host.close)
        device.pin(host.address, host.budget_bytes)
        undo.callback(device.unpin, host.address, host.budget_bytes)
        queues = {}
        for way in Direction:
            queues[way] = TransferQueue.open(device, way, f"layout-{way}")
            undo.callback(queues[way].close)
        rows = []
        for layout in LAYOUTS:
            geometry = geometry_of(shape, layout, num_blocks, device.page_bytes)
            for is_scattered in (False, True):
                used = used_blocks(num_blocks, num_blocks // 2, is_scattered=is_scattered)
                row = _measure(device, host, geometry, used, queues, rounds)
                rows.append({"layout": layout, "is_scattered": is_scattered} | row)
        return rows


def _measure(
    device: Device,
    host: KvHostCache,
    geometry: KvGeometry,
    used: Sequence[int],
    queues: dict[Direction, TransferQueue],
    rounds: int,
) -> dict[str, Any]:
    pool = PagePool(device.num_pages)
    kv = KvMemory(geometry, AddressRange(device, pool, geometry.num_pages), device, host)
    try:
        blocks = CountedBlocks(geometry.num_blocks)
        kv.attach(blocks)
        extents = [c for c in range(geometry.num_extents) if set(used) & {*geometry.blocks(c)}]
        kv.map(extents)
        blocks.keep(used)
        num_pages = device.num_pages - pool.num_free
        outs_s, ins_s = [], []
        for index in range(_WARM_UP + rounds):
            out_s, in_s = _out_s(kv, queues[Direction.OUT]), _in_s(kv, queues[Direction.IN])
            if index >= _WARM_UP:
                outs_s.append(out_s)
                ins_s.append(in_s)
    finally:
        kv.close()
    num_bytes = len(used) * geometry.block_bytes
    return {
        "bytes": num_bytes,
        "page_bytes": num_pages * device.page_bytes,
        "copies": len(geometry.extents(list(used))),
        "out_p50_s": median(outs_s),
        "in_p50_s": median(ins_s),
        "bytes_per_s": 2 * num_bytes / (median(outs_s) + median(ins_s)),
    }


def _out_s(kv: KvMemory, queue: TransferQueue) -> float:
    started_s = time.perf_counter()
    for group in kv.cut(kv.index.extents(Place.DEVICE)):
        kv.begin_page_out(group, queue)
    kv.finish(Place.LEAVING)
    return time.perf_counter() - started_s


def _in_s(kv: KvMemory, queue: TransferQueue) -> float:
    started_s = time.perf_counter()
    while away := kv.index.extents(Place.HOST):
        kv.begin_page_in([away[0]], queue)
    kv.finish(Place.ARRIVING)
    return time.perf_counter() - started_s
