"""The command lines of workers."""

from __future__ import annotations

from gpupoold.config.schema import DeviceSettings, Settings
from gpupoold.control.processes.engine_environment import compute_threads
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
        options["--gpu"] = device.gpu
    else:
        options |= {
            "--device-kind": device.kind,
            "--device-index": device.index or 0,
            "--reserve-bytes": reserve_bytes,
            "--page-bytes": device.page_bytes or 0,
            "--kv-host-bytes": settings.memory.kv_host_bytes,
            "--self-check-interval": settings.memory.self_check_interval,
            "--compute-threads": compute_threads(settings),
            "--num-sharing": sum(other.index == device.index for other in settings.devices)
            if device.kind == "cuda"
            else 1,
        }
    return as_words(options)
