"""Costs of a device's memory operations: mapping, copy streams, transfer queues, plain copies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.in_worker import figures
from benchmarks.in_worker.copies import plain_copies
from benchmarks.in_worker.idle import empty_device
from gpupoold.errors import Refused
from gpupoold.memory.bandwidth import Scratch, scratch_memory
from gpupoold.memory.device import Copy, CopyStream, Device, Direction
from gpupoold.memory.pages import PagePool, PageRun
from gpupoold.memory.transfers import TransferQueue

if TYPE_CHECKING:
    from gpupoold.worker.turns.loop import TurnLoop

_WARM_UP = 1
_COPY_BYTES = 64 << 20
_BATCH_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20)
_PIECE_BYTES = (4 << 10, 64 << 10)
_RUN_PAGES = (1, 4, 16, 64, 256)
_NUM_TRIPS = 50
_MIN_BYTES = 2 << 20


@dataclass(slots=True)
class _BenchCase:
    """A way to copy ``num_bytes``; ``run`` returns seconds, ``labels`` describe the way."""

    labels: dict[str, Any]
    num_bytes: int
    run: Callable[[], float]
    samples_s: list[float] = field(default_factory=list)


def bench_device(loop: TurnLoop, rounds: int) -> dict[str, Any]:
    """Measure costs and bandwidths of this worker's device, all in each round.

    Raises:
        Refused: the device is busy or too small to measure on.
    """
    empty_device(loop)
    device, pool = loop.own.device, loop.residency.pool
    num_bytes = min(_COPY_BYTES, pool.num_free // 2 * device.page_bytes)
    if num_bytes < _MIN_BYTES:
        raise Refused("the device has too few free pages to measure on", "use a larger device")
    with contextlib.ExitStack() as undo:
        scratch = undo.enter_context(scratch_memory(device, pool, num_bytes))
        copy_streams = {way: device.open_copy_stream(way) for way in Direction}
        queues = {way: TransferQueue.open(device, way, f"bench-{way}") for way in Direction}
        for way in Direction:
            undo.callback(copy_streams[way].close)
            undo.callback(queues[way].close)
        cases = [
            *_plain_cases(device, scratch),
            *_copy_stream_cases(scratch, copy_streams),
            *_queue_cases(scratch, queues),
        ]
        mappings = _Mappings(device, pool)
        trips_s: list[float] = []
        for index in range(_WARM_UP + rounds):
            taken_s, mapped = [case.run() for case in cases], mappings.measure()
            trips = [_round_trip_s(queues[Direction.IN], scratch) for _ in range(_NUM_TRIPS)]
            if index >= _WARM_UP:
                for case, seconds in zip(cases, taken_s, strict=True):
                    case.samples_s.append(seconds)
                mappings.keep(mapped)
                trips_s += trips
    return {
        "page_bytes": device.page_bytes,
        "pages": pool.num_pages,
        "rounds": rounds,
        "copies": _copy_rows(cases),
        "mapping": mappings.rows(),
        "transfer_round_trip": figures.times(trips_s),
    }


def _plain_cases(device: Device, scratch: Scratch) -> Iterator[_BenchCase]:
    for name, (copy_in, copy_out) in plain_copies(device, scratch).items():
        for direction, run in (("in", copy_in), ("out", copy_out)):
            yield _BenchCase({"by": name, "direction": direction}, scratch.num_bytes, run)


def _copy_stream_cases(
    scratch: Scratch, copy_streams: dict[Direction, CopyStream]
) -> Iterator[_BenchCase]:
    """Yield one contiguous copy per batch size, and batches of 8 MiB of small pieces."""
    for way, copy_stream in copy_streams.items():
        shapes = [("batch_bytes", size, size) for size in _BATCH_BYTES]
        shapes += [("piece_bytes", size, _BATCH_BYTES[-1]) for size in _PIECE_BYTES]
        for label, piece_bytes, batch_bytes in shapes:
            copies = _pieces(scratch, way, piece_bytes)
            per_batch = batch_bytes // piece_bytes
            batches = [copies[at : at + per_batch] for at in range(0, len(copies), per_batch)]
            yield _BenchCase(
                {"by": "copy_stream", "direction": way.name.lower(), label: piece_bytes},
                sum(copy.num_bytes for copy in copies),
                _copy_stream_run(copy_stream, batches),
            )


def _pieces(scratch: Scratch, way: Direction, piece_bytes: int) -> list[Copy]:
    """Return copies of all scratch memory, even pieces before odd, so that none are adjacent."""
    count = scratch.num_bytes // piece_bytes
    offsets = [at * piece_bytes for at in (*range(0, count, 2), *range(1, count, 2))]
    target, source = scratch.address, scratch.host_address
    if way is Direction.OUT:
        target, source = source, target
    return [Copy(target + offset, source + offset, piece_bytes) for offset in offsets]


def _copy_stream_run(
    copy_stream: CopyStream, batches: Sequence[Sequence[Copy]]
) -> Callable[[], float]:
    def run() -> float:
        """Start each batch before the previous one has finished, as a transfer queue does."""
        after = copy_stream.fence()
        started_s = time.perf_counter()
        before: int | None = None
        for batch in batches:
            number = copy_stream.begin(batch, after)
            if before is not None:
                copy_stream.wait(before)
            before = number
        if before is not None:
            copy_stream.wait(before)
        return time.perf_counter() - started_s

    return run


def _queue_cases(scratch: Scratch, queues: dict[Direction, TransferQueue]) -> Iterator[_BenchCase]:
    """Yield one transfer in one direction, and one in each direction at the same time."""
    half = scratch.num_bytes // 2
    first = Copy(scratch.address, scratch.host_address, half)
    second = Copy(scratch.host_address + half, scratch.address + half, half)
    both = {Direction.IN: first, Direction.OUT: second}

    def run(ways: Sequence[Direction]) -> float:
        started_s = time.perf_counter()
        transfers = [queues[way].begin([both[way]]) for way in ways]
        for transfer in transfers:
            transfer.wait()
        return time.perf_counter() - started_s

    for way in Direction:
        labels = {"by": "queue", "direction": way.name.lower()}
        yield _BenchCase(labels, half, partial(run, [way]))
    yield _BenchCase({"by": "queue", "direction": "both"}, 2 * half, partial(run, list(Direction)))


def _round_trip_s(queue: TransferQueue, scratch: Scratch) -> float:
    """Return the seconds to request, make and await a copy of a few bytes."""
    started_s = time.perf_counter()
    queue.begin([Copy(scratch.address, scratch.host_address, 4096)]).wait()
    return time.perf_counter() - started_s


def _copy_rows(cases: Sequence[_BenchCase]) -> list[dict[str, Any]]:
    """Return bandwidths and their ratios to the best plain copy of the same direction."""
    rates = [figures.bandwidth(case.num_bytes, case.samples_s) for case in cases]
    plain = ("device_copy", "memcpy_one_thread")
    best: dict[str, float] = {}
    for case, rate in zip(cases, rates, strict=True):
        if case.labels["by"] in plain:
            direction = case.labels["direction"]
            best[direction] = max(rate, best.get(direction, 0.0))
    best["both"] = max(best.values())
    return [
        case.labels | {"bytes_per_s": rate, "ratio": rate / best[case.labels["direction"]]}
        for case, rate in zip(cases, rates, strict=True)
    ]


class _Mappings:
    """Times to map and unmap pages, in one run and in runs of one page."""

    def __init__(self, device: Device, pool: PagePool) -> None:
        self._device = device
        self._pool = pool
        shapes = [(pages, num_runs) for pages in _RUN_PAGES for num_runs in sorted({1, pages})]
        self._samples: dict[tuple[int, int], list[tuple[float, float]]] = {
            shape: [] for shape in shapes if 2 * shape[0] <= pool.num_free
        }

    def measure(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Return the seconds to map and to unmap, by ``(pages, runs)``."""
        return {shape: self._measure(*shape) for shape in self._samples}

    def keep(self, measured: dict[tuple[int, int], tuple[float, float]]) -> None:
        for shape, seconds in measured.items():
            self._samples[shape].append(seconds)

    def rows(self) -> list[dict[str, Any]]:
        return [
            _mapping_row(pages, num_runs, samples)
            for (pages, num_runs), samples in self._samples.items()
            if samples
        ]

    def _measure(self, pages: int, num_runs: int) -> tuple[float, float]:
        device, taken, runs = self._device, *self._take(pages, num_runs)
        address = device.reserve(pages)
        started_s = time.perf_counter()
        device.map(address, runs)
        mapped_s = time.perf_counter()
        device.unmap(address, runs)
        ended_s = time.perf_counter()
        device.release(address, pages)
        self._pool.free(taken)
        return mapped_s - started_s, ended_s - mapped_s

    def _take(self, pages: int, num_runs: int) -> tuple[list[PageRun], list[PageRun]]:
        """Allocate pages; return all, and the runs to map: a single run, or every other page."""
        if num_runs == 1 and (run := self._pool.allocate_run(pages)) is not None:
            return [run], [run]
        taken = self._pool.allocate(2 * pages)
        every = [page for run in taken for page in range(run.first, run.end)]
        return taken, [PageRun(page, 1) for page in every[::2]]


def _mapping_row(
    pages: int, num_runs: int, samples: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    map_s = figures.p50([sample[0] for sample in samples])
    unmap_s = figures.p50([sample[1] for sample in samples])
    return {
        "pages": pages,
        "runs": num_runs,
        "map_p50_s": map_s,
        "unmap_p50_s": unmap_s,
        "map_s_per_page": map_s / pages,
        "unmap_s_per_page": unmap_s / pages,
    }
