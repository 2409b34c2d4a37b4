"""Speed of a model through gpupool and through ``vllm serve``, measured alternately on one GPU.

vLLM is started with the defaults of ``vllm serve``. Both are measured with 1, 16 and 64 streams. On
a group of GPUs vLLM has as many GPUs, with tensor parallelism.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.bench.overhead import OverheadPlan, measure_overhead
from benchmarks.gpu import figures
from benchmarks.gpu.rig import MAX_MODEL_LEN, Setting, shape_main

_KV_BYTES = 8 << 30
_DRY_KV_BYTES = 256 << 20
_KV_HOST_BYTES = 2 << 30
# Time left for the end of the last round, and for the end of both servers.
_END_S = 20.0
# A low share, because vLLM refuses to start if other processes use the requested share; the size of
# the KV is given separately.
_VLLM_OPTIONS = ("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes")
PLAN = OverheadPlan(
    rounds=4,
    num_streams=16,
    num_prompts=32,
    max_tokens=192,
    num_single=8,
    max_model_len=MAX_MODEL_LEN,
    dtype="auto",
    vllm_options=(*_VLLM_OPTIONS, str(_KV_BYTES)),
    more_streams=(1, 64),
    num_clients=4,
)
_EMULATED_PLAN = OverheadPlan(
    rounds=2, num_streams=2, num_prompts=4, max_tokens=16, num_single=2, more_streams=(1,)
)


def run(setting: Setting, shape: str) -> None:
    """Measure and report."""
    weight_bytes = setting.weight_bytes(shape)
    kv_bytes, plan = _KV_BYTES, PLAN
    if setting.is_emulated:
        kv_bytes, plan = 0, _EMULATED_PLAN
    elif setting.is_dry:
        kv_bytes = _DRY_KV_BYTES
        plan = replace(PLAN, rounds=2, vllm_options=(*_VLLM_OPTIONS, str(kv_bytes)))
    if setting.num_gpus > 1:
        plan = on_group(plan, setting.num_gpus)
    config = setting.device(weight_bytes + setting.num_gpus * kv_bytes)
    config += f"[memory]\nmodel_cache = {setting.model_cache_bytes([shape])}\n"
    config += f"kv_host = {_DRY_KV_BYTES if setting.is_dry else _KV_HOST_BYTES}\n"
    checkpoint = setting.checkpoint(shape)
    plan = replace(plan, ends_s=time.monotonic() + setting.left_s - _END_S)
    measured = measure_overhead(plan, checkpoint, config, setting.folder, setting.turn)
    found = overhead_figures(setting.label(shape), measured)
    limit = figures.DECODE_RATIO if setting.num_gpus == 1 else figures.GROUP_DECODE_RATIO
    found |= stream_figures(setting.label(shape), measured.get("by_streams", {}), limit)
    setting.report.add(found, overhead=measured)


def on_group(plan: OverheadPlan, num_gpus: int) -> OverheadPlan:
    """The plan for tensor parallelism over so many GPUs; KV sizes of vLLM are those of a GPU."""
    return replace(plan, vllm_options=(*plan.vllm_options, "--tensor-parallel-size", str(num_gpus)))


def stream_figures(
    label: str, by_streams: Mapping[int, Any], limit: float
) -> dict[str, figures.Figure]:
    """The figures for each number of streams; ``limit`` is the least ratio."""
    found = {}
    for count, row in by_streams.items():
        name = f"{label}_with_{count}_streams"
        found[f"{name}_decode_ratio"] = figures.at_least(row["tokens_per_s_ratio"], limit)
        for server in ("gpupool", "vllm"):
            rate = row[server]["tokens_per_s"]
            found[f"{name}_{server}_tokens_per_s"] = figures.measured(rate)
    return found


def overhead_figures(shape: str, measured: Mapping[str, Any]) -> dict[str, figures.Figure]:
    """The figures of both servers, and the ratio of their throughputs round by round."""
    ratio = measured["tokens_per_s_ratio"]
    found = {f"{shape}_decode_ratio": figures.at_least(ratio, figures.DECODE_RATIO)}
    for server in ("gpupool", "vllm"):
        for name in ("tokens_per_s", "ttft_p50_s"):
            value = figures.measured(measured[server][name])
            found[f"{shape}_{server}_{name}"] = value
    found[f"{shape}_ttft_p50_difference_s"] = figures.measured(measured["ttft_p50_delta_s"])
    return found


if __name__ == "__main__":
    sys.exit(shape_main(__doc__, run))
