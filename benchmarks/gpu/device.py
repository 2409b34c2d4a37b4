"""Cost of a GPU's memory operations, without an engine: copies, mapping, KV layouts.

Measures copies between pinned host memory and the device in each direction, alone and both at once,
plain and on the copy streams of transfers; mapping, access and unmapping by page size; and the
offload and restore of a request's KV by layout.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, cast

from benchmarks.gpu import figures
from benchmarks.gpu.layouts import bench_layouts
from benchmarks.gpu.rig import Report, Setting, arguments, setting_of
from benchmarks.gpu.timed_driver import TimedDriver
from benchmarks.in_worker.copies import plain_copies
from gpupoold.memory.bandwidth import Scratch, scratch_memory
from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.cuda.driver import CudaDriver
from gpupoold.memory.device import Copy, Device, Direction
from gpupoold.memory.emulated import EmulatedDevice
from gpupoold.memory.pages import PagePool, PageRun
from gpupoold.memory.transfers import TransferQueue

_WARM_UP = 2
_ROUNDS = 10
_CALLS = ("map", "allow_access", "unmap")


def run(setting: Setting) -> None:
    """Measure and report."""
    mib = 1 << 20
    pages = tuple(2 * mib << i for i in range(6))
    if setting.is_dry:
        pages = (setting.dry_bytes(mib // 16), setting.dry_bytes(mib // 4))
    num_bytes = setting.dry_bytes(4 * mib) if setting.is_dry else 1024 * mib
    num_blocks = 64 if setting.is_dry else 512
    shape = setting.shape("8B")
    # Memory for the copies, or for a KV cache with every page mapped.
    device_bytes = 2 * max(num_bytes, num_blocks * 16 * shape.kv_bytes_per_token)
    with opened(setting, device_bytes, pages[0] if setting.is_dry else None) as (device, _):
        report_copies(setting.report, device, num_bytes)
        rows = bench_layouts(device, shape, num_blocks, _ROUNDS)
        setting.report.add(layout_figures(rows), layouts=rows)
    mapping = []
    for page_bytes in pages:
        with opened(setting, device_bytes, page_bytes) as (device, driver):
            mapping.append(mapping_row(device, driver, num_bytes))
        setting.report.add(mapping_figures(mapping), mapping=mapping)


@contextlib.contextmanager
def opened(
    setting: Setting,
    device_bytes: int,
    page_bytes: int | None,
    make_driver: Callable[[], CudaDriver] = CudaDriver,
) -> Iterator[tuple[Device, TimedDriver | None]]:
    """The first GPU, and its driver; or an emulated device, which has none."""
    device: Device
    driver: TimedDriver | None = None
    if setting.is_emulated:
        device = EmulatedDevice(device_bytes, page_bytes)
    else:
        driver = TimedDriver(make_driver())
        device = CudaDevice(0, device_bytes, 0, page_bytes, driver=cast(CudaDriver, driver))
    try:
        yield device, driver
    finally:
        device.close()


def report_copies(report: Report, device: Device, num_bytes: int) -> None:
    """Bandwidths of ``num_bytes`` each way, all measured in turn, round by round."""
    with contextlib.ExitStack() as undo:
        scratch = undo.enter_context(scratch_memory(device, PagePool(device.num_pages), num_bytes))
        queues = {}
        for way in Direction:
            queues[way] = TransferQueue.open(device, way, f"bench-{way}")
            undo.callback(queues[way].close)
        copy_in, copy_out = plain_copies(device, scratch)["device_copy"]
        ways: dict[str, tuple[int, Callable[[], float]]] = {
            "pinned_in": (num_bytes, copy_in),
            "pinned_out": (num_bytes, copy_out),
            "queue_in": (num_bytes // 2, lambda: _queued_s(queues, scratch, [Direction.IN])),
            "queue_out": (num_bytes // 2, lambda: _queued_s(queues, scratch, [Direction.OUT])),
            "queue_both": (num_bytes, lambda: _queued_s(queues, scratch, [*Direction])),
        }
        samples_s: dict[str, list[float]] = {name: [] for name in ways}
        for index in range(_WARM_UP + _ROUNDS):
            for name, (_, copy) in ways.items():
                taken_s = copy()
                if index >= _WARM_UP:
                    samples_s[name].append(taken_s)
    rates = {name: ways[name][0] / median(taken) for name, taken in samples_s.items()}
    report.add(copy_figures(rates), copies={"bytes": num_bytes, "samples_s": samples_s})


def copy_figures(rates: Mapping[str, float]) -> dict[str, figures.Figure]:
    """Plain copies have no limit; those of the lanes are held against them."""
    found = {}
    for way in ("in", "out"):
        plain = rates[f"pinned_{way}"]
        found[f"pinned_{way}_bytes_per_s"] = figures.measured(plain)
        limit = figures.LANE_SHARE * plain
        found[f"queue_{way}_bytes_per_s"] = figures.at_least(rates[f"queue_{way}"], limit)
    both = rates["queue_both"]
    found["queue_both_ways_bytes_per_s"] = figures.measured(both)
    return found


def layout_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, figures.Figure]:
    """How fast a request's KV goes out and in, by layout."""
    found = {}
    for row in rows:
        blocks = "scattered" if row["is_scattered"] else "in_line"
        name = f"kv_{row['layout']}_{blocks}_bytes_per_s"
        found[name] = figures.measured(row["bytes_per_s"])
    return found


def mapping_row(device: Device, driver: TimedDriver | None, num_bytes: int) -> dict[str, Any]:
    """What it costs to map, open and unmap ``num_bytes`` in pages of this device."""
    num_pages = num_bytes // device.page_bytes
    runs = [PageRun(0, num_pages)]
    row: dict[str, Any] = {"page_bytes": device.page_bytes, "bytes": num_bytes}
    if driver is not None:
        row["create_p50_s"] = median(driver.taken_s("create"))
    address = device.reserve(num_pages)
    maps_s, unmaps_s = [], []
    for index in range(_WARM_UP + _ROUNDS):
        if index == _WARM_UP and driver is not None:
            driver.forget()
        started_s = time.perf_counter()
        device.map(address, runs)
        mapped_s = time.perf_counter()
        device.unmap(address, runs)
        unmaps_s.append(time.perf_counter() - mapped_s)
        maps_s.append(mapped_s - started_s)
    device.release(address, num_pages)
    row |= {"map_p50_s": median(maps_s[_WARM_UP:]), "unmap_p50_s": median(unmaps_s[_WARM_UP:])}
    if driver is not None:
        row |= {f"{call}_call_mean_s": fmean(driver.taken_s(call)) for call in _CALLS}
    return row


def mapping_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, figures.Figure]:
    """Seconds per GB, and of the single calls where a driver makes them."""
    found = {}
    for row in rows:
        kib = row["page_bytes"] >> 10
        page = f"{kib >> 10}MiB" if kib >= 1024 else f"{kib}KiB"
        for what in ("map", "unmap"):
            per_gb_s = row[f"{what}_p50_s"] / row["bytes"] * 1e9
            found[f"{what}_gigabyte_in_{page}_pages_s"] = figures.measured(per_gb_s)
        for call in _CALLS:
            if (mean_s := row.get(f"{call}_call_mean_s")) is not None:
                found[f"{call}_call_of_{page}_pages_s"] = figures.measured(mean_s)
        if (create_s := row.get("create_p50_s")) is not None:
            found[f"create_{page}_page_s"] = figures.measured(create_s)
    return found


def _queued_s(
    queues: Mapping[Direction, TransferQueue], scratch: Scratch, ways: Sequence[Direction]
) -> float:
    """Seconds of half of the memory each of these ways, at the same time."""
    half = scratch.num_bytes // 2
    copies = {
        Direction.IN: Copy(scratch.address, scratch.host_address, half),
        Direction.OUT: Copy(scratch.host_address + half, scratch.address + half, half),
    }
    started_s = time.perf_counter()
    for transfer in [queues[way].begin([copies[way]]) for way in ways]:
        transfer.wait()
    return time.perf_counter() - started_s


def main() -> int:
    """Run it; see the module."""
    run(setting_of(arguments(__doc__).parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
