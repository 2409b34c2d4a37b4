"""The host memory that a box is assumed to have, and the daemon's budgets on such a host.

A box is one host, as a daemon has.
"""

from __future__ import annotations

from gpupoold.config.budgets import Wishes, work_out
from gpupoold.config.machine import DeviceFacts, Machine, MachineError
from gpupoold.errors import UsageError
from gpupoold.latency.hardware import hardware
from gpupoold.sim.boxes import Box
from gpupoold.sim.host import NO_WISHES, HostMemory, HostWishes

_GIB = 1 << 30
# Aegaeon's nodes have 2 TB for eight H800 (section 7.1 of the paper).
_LARGE_GPU_BYTES, _HOST_BYTES_PER_LARGE_GPU = 70 * 10**9, 256 * _GIB
# The largest cloud instance with eight A10G (AWS g5.48xlarge) has 768 GiB.
_HOST_BYTES_PER_SMALL_GPU = 96 * _GIB


def host_bytes(box: Box) -> int:
    """Return the host memory that a box of these GPUs is assumed to have."""
    is_large = hardware(box.gpu).memory_bytes >= _LARGE_GPU_BYTES
    per_gpu = _HOST_BYTES_PER_LARGE_GPU if is_large else _HOST_BYTES_PER_SMALL_GPU
    return per_gpu * sum(box.groups)


def host_memory(box: Box, wishes: HostWishes = NO_WISHES) -> HostMemory:
    """Return the budgets of a box, worked out as by the daemon unless wished.

    Raises:
        UsageError: the wish leaves too little of the assumed host memory.
    """
    kv_bytes, cache_bytes = wishes.kv_host_bytes, wishes.model_cache_bytes
    if kv_bytes is None or cache_bytes is None:
        gpu = DeviceFacts("cuda", hardware(box.gpu).memory_bytes)
        machine = Machine(host_bytes(box), (gpu,) * sum(box.groups))
        try:
            budgets = work_out(Wishes(cache_bytes, kv_bytes), machine)
        except MachineError as error:
            raise UsageError(str(error), "give both --kv-host and --model-cache") from error
        kv_bytes, cache_bytes = budgets.kv_host_bytes, budgets.model_cache_bytes
    return HostMemory(kv_bytes, cache_bytes)
