"""The host memory that a box is assumed to have, and the daemon's budgets on such a box.

A box is one host, as a daemon has.
"""

from __future__ import annotations

from gpupoold.config.budgets import Wishes, default_engines_bytes, work_out
from gpupoold.config.machine import Machine, MachineDevice
from gpupoold.errors import SettingError, UsageError
from gpupoold.latency.shape import hardware
from gpupoold.sim.boxes import Box
from gpupoold.sim.host import NO_WISHES, HostMemory, HostWishes
from gpupoold.sim.hosting import EngineCosts

_GIB = 1 << 30
# Aegaeon's nodes have 2 TB for eight H800 (section 7.1 of the paper).
_LARGE_GPU_BYTES, _HOST_BYTES_PER_LARGE_GPU = 70 * 10**9, 256 * _GIB
# The largest cloud instance with eight A10G (AWS g5.48xlarge) has 768 GiB.
_HOST_BYTES_PER_SMALL_GPU = 96 * _GIB
LOAD_S = 13.0
"""Measured per further FP8 model of 9 GB on an H200, compiled kernels (docs/internals/gpu.md)."""


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
        try:
            budgets = work_out(Wishes(cache_bytes, kv_bytes), _machine(box))
        except SettingError as error:
            raise UsageError(str(error), "give both --kv-host and --model-cache") from error
        kv_bytes, cache_bytes = budgets.kv_host_bytes, budgets.model_cache_bytes
    return HostMemory(kv_bytes, cache_bytes)


def engine_costs(box: Box, wishes: HostWishes = NO_WISHES) -> EngineCosts | None:
    """Return the costs of the engines of a box; None if engines take no memory.

    The limit is the daemon's default unless wished. Groups need no other figures: an engine takes
    the memory on each of their GPUs.

    Raises:
        UsageError: the wishes have a limit or a time of loads, but no memory of an engine.
    """
    if wishes.engine_bytes is None:
        if wishes.engines_bytes is None and wishes.load_s is None:
            return None
        raise UsageError(
            "the memory of an engine is not given", "add --engine-memory, such as 280MB"
        )
    limit_bytes = wishes.engines_bytes
    if limit_bytes is None:
        limit_bytes = default_engines_bytes(work_out(Wishes(), _machine(box)))
    load_s = LOAD_S if wishes.load_s is None else wishes.load_s
    return EngineCosts(wishes.engine_bytes, limit_bytes, load_s, wishes.own_engine_bytes)


def _machine(box: Box) -> Machine:
    gpu = MachineDevice("cuda", hardware(box.gpu).memory_bytes)
    return Machine(host_bytes(box), (gpu,) * sum(box.groups))
