"""Measurements of memory operations inside a worker, without the time of messages.

A worker answers the calls in ``OPERATIONS`` where ``GPUPOOL_OPERATIONS`` names this package.
"""

from __future__ import annotations

from benchmarks.in_worker.device import bench_device
from benchmarks.in_worker.digests import checksum
from benchmarks.in_worker.dtype import set_default_dtype
from benchmarks.in_worker.idle import leftovers
from benchmarks.in_worker.kv_swap import bench_kv
from benchmarks.in_worker.switch import bench_switch

OPERATIONS = {
    "bench_device": bench_device,
    "bench_kv": bench_kv,
    "bench_switch": bench_switch,
    "checksum": checksum,
    "leftovers": leftovers,
    "set_default_dtype": set_default_dtype,
}
