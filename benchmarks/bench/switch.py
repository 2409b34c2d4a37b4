"""Measurement of switches between two models on a private daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from benchmarks.bench.cold import measure_cold
from benchmarks.bench.in_daemon import bench_switch
from benchmarks.bench.rig import device_config, emulated_config, make_checkpoints
from benchmarks.private_daemon import private_daemon
from gpupool_cli.diagnostics import say
from gpupoold.config.sections import LEAST_KV_HOST_BYTES
from gpupoold.domain import WarmSource
from gpupoold.units import format_bytes

MAX_MODEL_LEN = 1024
_MIN_KV_BYTES = 1 << 20
# Live KV of each model in the rounds with KV: a tenth of its weights.
_KV_SHARE = 0.1
_SLACK_BYTES = 32 << 20
# Starts from disk are slow, so a quarter of the rounds is measured.
_COLD_FACTOR = 4
_PROMPTS = (32, 400)
_OLD_COPY_SHARE = 1.3
_OLD_EXTRA_S = 0.005


def run_switch_bench(
    folder: Path, size_bytes: int, rounds: int, num_gpus: int = 1, link: str = ""
) -> dict[str, Any]:
    """Return switch times of all modes, on a device with space for two equal models.

    With ``link``, an emulated device has a modelled link of this bandwidth.

    The keys besides ``modes`` concern a device with space for one model: all bytes of one model
    move out, all bytes of the other in, without KV.

    Raises:
        GpupoolError: the models could not be made or served.
    """
    say(f"making two checkpoints of {format_bytes(size_bytes)}")
    checkpoints = make_checkpoints(folder, ["llama", "qwen3"], size_bytes, num_gpus)
    kv_bytes = max(_MIN_KV_BYTES, int(_KV_SHARE * size_bytes))
    with private_daemon(_config(size_bytes, kv_bytes, num_gpus, link)) as daemon:
        names = [path.name for path in checkpoints]
        for path in checkpoints:
            say(f"loading {path.name}")
            daemon.add_model(path.name, path, dtype="float32", max_model_len=MAX_MODEL_LEN)
        say(f"switching {rounds} times each way, in three modes, without and with KV")
        with daemon.client() as client:
            measured = bench_switch(
                client, (names[0], names[1]), rounds, get_args(WarmSource), kv_bytes, _PROMPTS
            )
        warm = measured["modes"]["host_cached"]["without_kv"]
        num_starts = max(1, rounds // _COLD_FACTOR)
        say(f"starting each model {num_starts} times from disk")
        cold = measure_cold(daemon, names, num_starts, warm["limit_s"])
        measured["modes"]["cold_from_disk"] = {"without_kv": cold}
    return _headline(measured) | measured


def _config(size_bytes: int, kv_bytes: int, num_gpus: int, link: str) -> str:
    kv_host_bytes = max(LEAST_KV_HOST_BYTES, 8 * kv_bytes + _SLACK_BYTES)
    memory = f"[memory]\nkv_host = {kv_host_bytes}\n"
    memory += f"snapshot_files = {3 * size_bytes + _SLACK_BYTES}\n"
    # A checkpoint may be 5 % larger than requested. Both models' KV grows by some tokens in
    # every round, and prefetching leaves room for a turn's KV.
    num_bytes = int(2.3 * size_bytes) + 8 * kv_bytes + _SLACK_BYTES
    if link:
        return emulated_config(num_bytes, num_gpus=num_gpus, link=link) + memory
    return device_config(num_bytes, num_gpus) + memory


def _headline(measured: dict[str, Any]) -> dict[str, Any]:
    row = measured["modes"]["host_cached"]["without_kv"]
    memcpy_s = row["memcpy_p50_s"]
    return {
        "switches": row["samples"],
        "bytes": row["bytes"],
        "switch_p50_s": row["p50_s"],
        "switch_p99_s": row["p99_s"],
        "memcpy_p50_s": memcpy_s,
        "ratio": row["p50_s"] / memcpy_s,
        "limit_s": _OLD_COPY_SHARE * memcpy_s + _OLD_EXTRA_S,
        "stages_p50_s": row["stages_p50_s"],
    }
