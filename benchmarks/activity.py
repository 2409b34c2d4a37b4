"""Cost of a worker's writes to the activity page: ``python -m benchmarks.activity``."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpupoold.system.activity import ActivityPage, ThreadPhase, create_page

_NUM_CALLS = 20_000
_SIZES = (1, 64, 256)


def main() -> None:
    """Print microseconds for a step, and for a phase."""
    page = ActivityPage()
    page.attach(create_page())

    def phase() -> None:
        with page.main.doing(ThreadPhase.SWITCH, "llama"):
            pass

    print(f"a phase: {_microseconds(phase):.2f} us")
    for size in _SIZES:
        ids = [f"cmpl-{number:016x}-0-{number:08x}" for number in range(size)]
        batches = [ids, [*ids[1:], "another"]]

        def step(batches: list[list[str]] = batches) -> None:
            page.begin_scheduling("llama")
            page.begin_step("llama", list(batches[0]))
            page.end_steps(num_under_way=1)

        def other_step(batches: list[list[str]] = batches) -> None:
            step()
            step()  # twice, because both slots of the page had the batch before
            batches.reverse()

        same_us = _microseconds(step)
        changed_us = _microseconds(other_step) / 2
        print(
            f"a step of {size} requests: {same_us:.2f} us; of others than before {changed_us:.2f}"
        )


def _microseconds(call: Callable[[], None]) -> float:
    """The best of five."""
    times = []
    for _ in range(5):
        started_s = time.perf_counter()
        for _ in range(_NUM_CALLS // 5):
            call()
        times.append((time.perf_counter() - started_s) / (_NUM_CALLS // 5))
    return min(times) * 1e6


if __name__ == "__main__":
    main()
