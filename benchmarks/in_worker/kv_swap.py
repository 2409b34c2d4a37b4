"""Speed of a model's KV to the host and back, and the effect on another model's steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.in_worker import figures
from benchmarks.in_worker.copies import plain_copies
from benchmarks.in_worker.digests import kv_digest
from benchmarks.in_worker.idle import empty_device
from benchmarks.in_worker.live import BenchmarkRequests
from gpupoold.errors import Failed
from gpupoold.memory.bandwidth import Scratch, scratch_memory
from gpupoold.memory.device import Direction
from gpupoold.memory.kv_extents import Place
from gpupoold.memory.transfers import TransferQueue

if TYPE_CHECKING:
    from gpupoold.worker.turns.loop import TurnLoop

_WARM_UP = 1
# KV of the model that decodes during the copies: some hundred tokens.
_OTHER_KV_BYTES = 4 << 20
_MAX_STEPS = 2_000


def bench_kv(loop: TurnLoop, models: list[str], rounds: int, kv_bytes: int) -> dict[str, Any]:
    """Page the first model's KV out and in, alone and while the second model decodes.

    Both models stay resident. The bytes are compared at the end; plain copies of the same size are
    made in between.

    Raises:
        Refused: the device is busy or too small.
    """
    moved, other = (loop.engine(name) for name in models)
    empty_device(loop)
    with contextlib.ExitStack() as undo:
        queue = TransferQueue.open(loop.own.device, Direction.OUT, "bench-out")
        undo.callback(queue.close)
        lives = [
            BenchmarkRequests(moved, loop.residency, kv_bytes),
            BenchmarkRequests(other, loop.residency, min(kv_bytes, _OTHER_KV_BYTES)),
        ]
        for live in lives:
            undo.callback(live.stop)
            live.start()
        loop.residency.switch_in(moved.name)
        bench = _SwapBench(loop, lives[0], lives[1], queue)
        before = kv_digest(loop.own.device, moved)
        with scratch_memory(loop.own.device, loop.residency.pool, bench.num_bytes) as scratch:
            swap = bench.swap(rounds, scratch, plain_copies(loop.own.device, scratch))
        overlap = bench.overlap(rounds, swap["out_p50_s"] + swap["in_p50_s"])
        is_intact = kv_digest(loop.own.device, moved) == before
    return {"kv_swap": swap | {"is_intact": is_intact}, "kv_overlap": overlap}


class _SwapBench:
    """Copies the KV of ``moved`` out through ``queue``, and back as a switch does."""

    def __init__(
        self,
        loop: TurnLoop,
        moved: BenchmarkRequests,
        other: BenchmarkRequests,
        queue: TransferQueue,
    ) -> None:
        self._residency = loop.residency
        self._moved = moved.engine
        self._other = other
        self._queue = queue
        self.num_bytes = moved.kv_bytes

    def swap(
        self,
        rounds: int,
        scratch: Scratch,
        plain: dict[str, tuple[Callable[[], float], Callable[[], float]]],
    ) -> dict[str, Any]:
        """Page out and in on an idle device; in each round also copy and map the same size
        plainly.
        """
        outs_s, ins_s, maps_s = [], [], []
        memcpys_s: dict[str, list[float]] = {name: [] for name in plain}
        for index in range(_WARM_UP + rounds):
            out_s, in_s, map_s = self._out_s(), self._in_s(), _map_again_s(scratch)
            copies_s = {name: sum(copy() for copy in way) for name, way in plain.items()}
            if index < _WARM_UP:
                continue
            outs_s.append(out_s)
            ins_s.append(in_s)
            maps_s.append(map_s)
            for name, seconds in copies_s.items():
                memcpys_s[name].append(seconds)
        return _swap_summary(2 * self.num_bytes, outs_s, ins_s, maps_s, memcpys_s)

    def overlap(self, rounds: int, alone_s: float) -> dict[str, Any]:
        """Time the other model's steps, alone and while KV moves out and in.

        ``alone_s`` is the time to move KV out and in when waited for.
        """
        quiet_s, busy_s, extras_s = [], [], []
        for index in range(_WARM_UP + rounds):
            during = [*self._steps_during_out(), *self._steps_during_in()]
            quiet = [self._step_s() for _ in during]
            if index < _WARM_UP:
                continue
            busy_s += during
            quiet_s += quiet
            extras_s.append(sum(during) - sum(quiet))
        share = figures.hidden_share(figures.p50(extras_s), alone_s)
        return {
            "bytes": 2 * self.num_bytes,
            "step_p50_s": figures.p50(quiet_s),
            "step_during_p50_s": figures.p50(busy_s),
            "step_during_p99_s": figures.p99(busy_s),
            "steps_during": len(busy_s) / rounds,
            "bytes_per_s": 2 * self.num_bytes * rounds / sum(busy_s),
            "transfer_alone_s": alone_s,
            "hidden_share": share,
            "rounds": rounds,
        }

    def _out_s(self) -> float:
        kv = self._moved.kv
        started_s = time.perf_counter()
        for group in kv.cut(kv.index.extents(Place.DEVICE)):
            self._begin_out(group)
        kv.finish(Place.LEAVING)
        return time.perf_counter() - started_s

    def _in_s(self) -> float:
        started_s = time.perf_counter()
        self._residency.make_resident(self._moved.name)
        return time.perf_counter() - started_s

    def _steps_during_out(self) -> Iterator[float]:
        """Yield the seconds of the other model's steps until all KV is on the host."""
        kv = self._moved.kv
        while kv.index.extents(Place.DEVICE) or kv.index.extents(Place.LEAVING):
            yield self._step_s(self._begin_some_out)

    def _steps_during_in(self) -> Iterator[float]:
        """Yield the seconds of the other model's steps until all KV is back."""
        residency, moved, other = self._residency, self._moved.name, self._other.engine.name
        residency.switch_in(other)
        for _ in range(_MAX_STEPS):
            yield self._step_s(lambda: residency.prefetch(moved, other))
            if self._moved.kv.is_whole:
                residency.stop_prefetch()  # else the KV would return right after the offload
                return
        raise Failed(f"the KV of {moved} did not arrive while another model ran")

    def _step_s(self, before: Callable[[], None] | None = None) -> float:
        """Return the seconds of one step of the other model, including the work for transfers."""
        started_s = time.perf_counter()
        if before is not None:
            before()
        self._residency.advance(self._other.engine.name)
        if not self._other.can_step:
            raise Failed(f"the requests of {self._other.engine.name} are too short")
        self._other.step()
        return time.perf_counter() - started_s

    def _begin_some_out(self) -> None:
        """Start to offload as much as the queue accepts before the next step."""
        kv = self._moved.kv
        for group in kv.cut(kv.index.extents(Place.DEVICE)):
            if not self._queue.has_room:
                return
            self._begin_out(group)

    def _begin_out(self, extents: list[int]) -> None:
        if self._moved.kv.begin_page_out(extents, self._queue) < len(extents):
            raise Failed("the KV host cache is full", "raise memory.kv_host")


def _map_again_s(scratch: Scratch) -> float:
    """Return the seconds to unmap all pages of ``scratch`` and to map as many again."""
    pages = range(scratch.address_range.num_pages)
    started_s = time.perf_counter()
    scratch.address_range.drop(pages)
    scratch.address_range.retain(pages, is_filled=False)
    return time.perf_counter() - started_s


def _swap_summary(
    num_bytes: int,
    outs_s: list[float],
    ins_s: list[float],
    maps_s: list[float],
    plain_s: dict[str, list[float]],
) -> dict[str, Any]:
    """Return the figures, each round relative to plain copies and mappings of the same round.

    A temporary slowdown of the machine affects both sides; the median of the ratios counts.
    """
    both_s = [out_s + in_s for out_s, in_s in zip(outs_s, ins_s, strict=True)]
    measured = figures.bandwidth(num_bytes, both_s)
    ratios = {
        name: figures.p50(
            [
                (copy_s + map_s) / swap_s
                for copy_s, map_s, swap_s in zip(taken, maps_s, both_s, strict=True)
            ]
        )
        for name, taken in plain_s.items()
    }
    # The reference is memcpy by one thread if the CPU copies, the device's own copy on a GPU.
    ratio = ratios.get("memcpy_one_thread", ratios["device_copy"])
    limit = figures.KV_SWAP_SHARE * measured / ratio
    summary = figures.times(both_s) | {
        "bytes": num_bytes,
        "out_p50_s": figures.p50(outs_s),
        "in_p50_s": figures.p50(ins_s),
        "map_p50_s": figures.p50(maps_s),
        "bytes_per_s": measured,
        "memcpy_bytes_per_s": {
            name: figures.bandwidth(num_bytes, taken) for name, taken in plain_s.items()
        },
        "ratio_to_device_copy": ratios["device_copy"],  # includes mapping
    }
    return summary | figures.at_least(measured, limit, "bytes_per_s")
