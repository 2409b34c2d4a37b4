"""Measurement of a device's memory operations and of KV transfers, on a private daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.bench.in_daemon import bench_device, bench_kv
from benchmarks.bench.rig import device_config, make_checkpoints
from benchmarks.private_daemon import private_daemon
from gpupool_cli.diagnostics import say
from gpupoold.config.sections import LEAST_KV_HOST_BYTES
from gpupoold.units import format_bytes

# Long enough for requests that run while KV moves.
_MAX_MODEL_LEN = 4096
_SLACK_BYTES = 192 << 20


def run_memory_bench(folder: Path, size_bytes: int, kv_bytes: int, rounds: int) -> dict[str, Any]:
    """Costs and bandwidths of the device, then ``kv_bytes`` of a model's KV out and in.

    Raises:
        GpupoolError: the models could not be made or served.
    """
    say(f"making two checkpoints of {format_bytes(size_bytes)}")
    checkpoints = make_checkpoints(folder, ["llama", "qwen3"], size_bytes)
    with private_daemon(_config(size_bytes, kv_bytes)) as daemon, daemon.client() as client:
        say("measuring the device")
        measured = bench_device(client, rounds)
        for path in checkpoints:
            say(f"loading {path.name}")
            daemon.add_model(path.name, path, dtype="float32", max_model_len=_MAX_MODEL_LEN)
        first, second = (path.name for path in checkpoints)
        say(f"moving {format_bytes(kv_bytes)} of KV out and in")
        return measured | bench_kv(client, (first, second), rounds, kv_bytes)


def _config(size_bytes: int, kv_bytes: int) -> str:
    # The models, the KV, and the same amount for plain copies.
    device = device_config(int(2.3 * size_bytes) + int(2.5 * kv_bytes) + _SLACK_BYTES)
    kv_host_bytes = max(LEAST_KV_HOST_BYTES, 2 * kv_bytes + _SLACK_BYTES)
    return device + f"[memory]\nkv_host = {kv_host_bytes}\n"
