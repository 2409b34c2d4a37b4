"""The environment variables of processes with an engine."""

from __future__ import annotations

import os

from gpupoold.config.schema import Settings


def engine_environment(settings: Settings) -> dict[str, str]:
    """Threads, and on emulated devices how the C library copies.

    Copies past the caches, as a GPU's are, are half as fast again for pieces of some MiB; the C
    library would else keep these in caches that the engine needs.
    """
    threads = os.environ.get("OMP_NUM_THREADS", str(compute_threads(settings)))
    found = {"OMP_NUM_THREADS": threads}
    if any(device.kind == "emulated" for device in settings.devices):
        tunable = "glibc.cpu.x86_non_temporal_threshold=0x40000"
        others = os.environ.get("GLIBC_TUNABLES")
        found["GLIBC_TUNABLES"] = f"{others}:{tunable}" if others else tunable
    return found


def compute_threads(settings: Settings) -> int:
    """Return the compute threads per emulated device.

    One core stays free for the daemon and the frontend, as in vLLM's API server: compute threads
    spin, and a spinning thread without a core stalls the others.
    """
    num_computing = sum(device.kind != "sim" for device in settings.devices)
    return max(1, (len(os.sched_getaffinity(0)) - 1) // max(1, num_computing))
