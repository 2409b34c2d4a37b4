"""The command lines of workers, and the environment of processes with an engine."""

from __future__ import annotations

import os

from gpupoold.config.schema import Settings
from gpupoold.config.sections import DeviceSettings
from gpupoold.system.process import as_words


def module_of(device: DeviceSettings) -> str:
    """Return the module of the device's worker process."""
    return "gpupoold.simdevice" if device.kind == "sim" else "gpupoold.worker"


def arguments_of(settings: Settings, number: int) -> list[str]:
    """Return the command-line options of a device's worker."""
    device = settings.devices[number]
    reserve_bytes = settings.memory.reserve_for(device.kind)
    options: dict[str, object] = {
        "--device": number,
        "--device-bytes": max(0, (device.memory_bytes or 0) - reserve_bytes),
        "--log-level": settings.log.level,
    }
    if device.kind == "sim":
        options |= {"--gpu": device.gpu, "--num-gpus": device.num_gpus}
        if settings.simulated_host.memory_bytes is not None:
            options["--kv-host-bytes"] = settings.memory.kv_host_bytes
    else:
        options |= {
            "--device-kind": device.kind,
            "--num-gpus": device.num_gpus,
            "--are-cores-shared": int(_num_computing(settings) > len(os.sched_getaffinity(0))),
            "--gpus": ",".join(map(str, device.gpus)) or "0",
            "--reserve-bytes": reserve_bytes,
            "--page-bytes": device.page_bytes or 0,
            "--link-bytes-per-s": device.link_bytes_per_s or 0,
            "--kv-host-bytes": settings.memory.kv_host_bytes,
            "--self-check-interval": settings.memory.self_check_interval,
            "--compute-threads": compute_threads(settings),
            "--are-threads-set": int("OMP_NUM_THREADS" in os.environ),
            "--num-sharing": max(1, sum(other.gpus == device.gpus for other in settings.devices))
            if device.kind == "cuda"
            else 1,
        }
        if settings.memory.prefix_cache_bytes is not None:
            options["--prefix-cache-bytes"] = settings.memory.prefix_cache_bytes
        if settings.memory.kv_files_bytes:
            options["--kv-files"] = settings.kv_folder
            options["--kv-files-bytes"] = settings.memory.kv_files_bytes
    return as_words(options)


def engine_environment(settings: Settings) -> dict[str, str]:
    """Return variables for the number of threads, and on emulated devices for copies in memory.

    The C library then copies pieces of some MiB past the processor's caches, which the engine
    needs; such copies are 1.5 times as fast.
    """
    threads = os.environ.get("OMP_NUM_THREADS", str(compute_threads(settings)))
    found = {"OMP_NUM_THREADS": threads}
    if any(device.kind == "emulated" for device in settings.devices):
        tunable = "glibc.cpu.x86_non_temporal_threshold=0x40000"
        others = os.environ.get("GLIBC_TUNABLES")
        found["GLIBC_TUNABLES"] = f"{others}:{tunable}" if others else tunable
    return found


def compute_threads(settings: Settings) -> int:
    """Return the compute threads per GPU of an emulated device.

    One core stays free for the daemon and the frontend, as in vLLM's API server: compute threads
    spin, and a spinning thread without a core stalls all compute threads.
    """
    return max(1, (len(os.sched_getaffinity(0)) - 1) // max(1, _num_computing(settings)))


def _num_computing(settings: Settings) -> int:
    return sum(one.num_gpus for one in settings.devices if one.kind != "sim")
