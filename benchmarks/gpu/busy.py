"""Cost of page-table calls while the GPU is busy, and speed of transfers while Python is busy.

Maps, opens and unmaps pages while the GPU is idle, while an unrelated kernel runs and while an
unrelated copy runs: a call that waits for either would stop every stream of the GPU. Transfers are
measured with several batch sizes, with an idle and with a computing main thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.gpu import figures
from benchmarks.gpu.device import opened
from benchmarks.gpu.rig import Setting, arguments, setting_of
from benchmarks.gpu.timed_driver import TimedDriver
from gpupoold.memory.bandwidth import Scratch, scratch_memory
from gpupoold.memory.device import Copy, Device, Direction
from gpupoold.memory.pages import PagePool, PageRun
from gpupoold.memory.transfers import TransferQueue

# A call may take so much longer beside a kernel or copy of 100 ms. A call that waits takes 100 ms.
BUSY_EXTRA_S = 0.02
_NUM_PAGES = 32
_ROUNDS = 5
_BATCHES_MIB = (8, 32, 64)
_CALLS = ("map", "allow_access", "unmap")
_SLEEP_CYCLES = 200_000_000  # 0.1 s at 2 GHz
# The switch interval of a worker (gpupoold.worker.__main__).
_SWITCH_INTERVAL_S = 1e-4


def run(setting: Setting) -> None:
    """Measure and report."""
    num_bytes = setting.dry_bytes(4 << 20) if setting.is_dry else 4 << 30
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    page_bytes = setting.dry_bytes(1 << 16) if setting.is_dry else None
    with opened(setting, 2 * num_bytes, page_bytes) as (device, driver):
        with scratch_memory(device, PagePool(device.num_pages), num_bytes) as scratch:
            rows = [
                queue_row(device, scratch, mib << 20, is_python_busy=is_busy)
                for mib in _BATCHES_MIB
                for is_busy in (False, True)
            ]
        setting.report.add(queue_figures(rows), queues=rows)
        if driver is not None:
            calls = page_table_rows(device, driver, num_bytes)
            setting.report.add(page_table_figures(calls), page_table_calls=calls)


def queue_row(
    device: Device, scratch: Scratch, batch_bytes: int, *, is_python_busy: bool
) -> dict[str, Any]:
    """The rate of one transfer of all of ``scratch`` in, and the loops of Python beside it."""
    queue = TransferQueue(device.open_copy_streams(Direction.IN), "bench-busy", batch_bytes)
    started_s = time.perf_counter()
    transfer = queue.begin([Copy(scratch.address, scratch.host_address, scratch.num_bytes)])
    num_loops = 0
    while is_python_busy and not transfer.has_ended:
        num_loops += sum(range(100)) > 0
    transfer.wait()
    taken_s = time.perf_counter() - started_s
    queue.close()
    return {
        "batch_bytes": batch_bytes,
        "is_python_busy": is_python_busy,
        "bytes_per_s": scratch.num_bytes / taken_s,
        "loops_per_s": num_loops / taken_s,
    }


def queue_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, figures.Figure]:
    """With Python busy, the rate of each batch size is compared with the best rate when idle."""
    best = max(row["bytes_per_s"] for row in rows if not row["is_python_busy"])
    found = {}
    for row in rows:
        name = f"queue_in_{row['batch_bytes'] >> 20}MiB_batches"
        if row["is_python_busy"]:
            limit = figures.LANE_SHARE * best
            found[f"{name}_python_busy_bytes_per_s"] = figures.at_least(row["bytes_per_s"], limit)
        else:
            found[f"{name}_bytes_per_s"] = figures.measured(row["bytes_per_s"])
    return found


def page_table_rows(device: Device, driver: TimedDriver, num_bytes: int) -> list[dict[str, Any]]:
    """Seconds of each call for some pages, beside nothing, a kernel and a copy."""
    import torch

    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    beside: dict[str, Callable[[], object]] = {
        "idle": lambda: None,
        "kernel": lambda: torch.cuda._sleep(_SLEEP_CYCLES),  # type: ignore[no-untyped-call]
        "copy": lambda: target.copy_(host, non_blocking=True),
    }
    address = device.reserve(_NUM_PAGES)
    rows = []
    for what, begin in beside.items():
        calls: dict[str, list[float]] = {call: [] for call in _CALLS}
        was_busy = []
        for _ in range(_ROUNDS):
            driver.forget()
            with torch.cuda.stream(stream):
                begin()
            device.map(address, [PageRun(0, _NUM_PAGES)])
            driver.unmap(address, _NUM_PAGES * device.page_bytes)
            was_busy.append(not stream.query())
            for call in _CALLS:
                calls[call].append(sum(driver.taken_s(call)))
            stream.synchronize()
        seconds = {f"{call}_p50_s": median(taken) for call, taken in calls.items()}
        rows.append({"beside": what, "was_busy_after": was_busy, **seconds})
    device.release(address, _NUM_PAGES)
    return rows


def page_table_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, figures.Figure]:
    """Each call beside a kernel or a copy; the limit is the time on an idle GPU and some more."""
    idle = next(row for row in rows if row["beside"] == "idle")
    found = {}
    for row in rows:
        for call in _CALLS:
            key = f"{call}_p50_s"
            figure = figures.at_most(row[key], idle[key] + BUSY_EXTRA_S)
            found[f"{call}_{_NUM_PAGES}_pages_beside_{row['beside']}_p50_s"] = figure
    return found


def main() -> int:
    """Run it; see the module."""
    run(setting_of(arguments(__doc__).parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
