"""Models added to a device with default settings: all of its memory, vLLM's compiler and graphs.

The other benchmarks limit the device's memory or the engines' batches. Here only the caches in host
memory have a size. After each model the free device memory and the devices' accounts are read, and
an answer is generated.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import httpx

from benchmarks.gpu import figures
from benchmarks.gpu.rig import Setting, add_timed, shape_main
from benchmarks.private_daemon import PrivateDaemon

_NUM_MODELS = 3
_NUM_TOKENS = 64
_KV_HOST_BYTES = 2 << 30
_DRY_KV_HOST_BYTES = 64 << 20


def run(setting: Setting, shape: str) -> None:
    """Measure and report model by model."""
    path = setting.checkpoint(shape)
    config = setting.whole_device()
    config += f"[memory]\nmodel_cache = {setting.model_cache_bytes([shape] * _NUM_MODELS)}\n"
    config += f"kv_host = {_DRY_KV_HOST_BYTES if setting.is_dry else _KV_HOST_BYTES}\n"
    rows: list[dict[str, Any]] = []
    with setting.daemon(config) as daemon:
        for index in range(_NUM_MODELS):
            name = f"{shape}-{index}".lower()
            started_s = time.perf_counter()
            add_timed(setting, daemon, name, path)
            added_s = time.perf_counter() - started_s
            with daemon.client() as client:
                accounts = client.check()
            num_tokens = answer_tokens(daemon, name)
            rows.append(
                {
                    "model": name,
                    "add_s": added_s,
                    "answer_tokens": num_tokens,
                    "free_bytes": free_device_bytes() if not setting.is_emulated else 0,
                    "accounts": accounts,
                }
            )
            setting.report.add(default_figures(shape, rows), models=rows)


def default_figures(shape: str, rows: list[dict[str, Any]]) -> dict[str, figures.Figure]:
    """How many models were added and answer, how long the first and the last took."""
    answering = sum(row["answer_tokens"] == _NUM_TOKENS for row in rows)
    return {
        f"{shape}_default_models": figures.at_least(answering, _NUM_MODELS),
        f"{shape}_default_first_add_s": figures.measured(rows[0]["add_s"]),
        f"{shape}_default_last_add_s": figures.measured(rows[-1]["add_s"]),
        f"{shape}_default_free_device_bytes": figures.measured(rows[-1]["free_bytes"]),
    }


def answer_tokens(daemon: PrivateDaemon, model: str) -> int:
    """The number of tokens of one answer, sampled with top-p."""
    body = {"model": model, "prompt": "Tell me about it. " * 20, "max_tokens": _NUM_TOKENS}
    body |= {"ignore_eos": True, "top_p": 0.9, "temperature": 0.8}
    response = httpx.post(f"{daemon.http_url}/v1/completions", json=body, timeout=120.0)
    response.raise_for_status()
    return int(response.json()["usage"]["completion_tokens"])


def free_device_bytes() -> int:
    """Free memory of the first GPU, by NVML."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free)
    finally:
        pynvml.nvmlShutdown()


if __name__ == "__main__":
    sys.exit(shape_main(__doc__, run))
