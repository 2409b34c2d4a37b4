"""Duration of vLLM's sleep (levels 1 and 2) and wake-up of a model, to compare with a switch.

Level 1 copies the weights to host memory and back. Level 2 discards the weights and reads these
from the checkpoint again.

Two models can share a GPU with vLLM alone if one sleeps while the other runs. A switch is then a
sleep and a wake-up; for two models of the same size, the sleep and wake-up of one model are
representative. On a CPU vLLM's calls do nothing: a dry run only shows that the calls of level 1
succeed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.gpu import figures
from benchmarks.gpu.rig import MAX_MODEL_LEN, Setting, shape_main
from gpupoold.errors import Failed

if TYPE_CHECKING:
    from vllm import LLM

_WARM_UP = 1
_ROUNDS = 5
_LEVEL_2_ROUNDS = 2
_KV_BYTES = 1 << 30
_DRY_KV_BYTES = 1 << 26
_PROMPT = [300 + index for index in range(100)]
_NUM_TOKENS = 16
# Time left for the work after the last round.
_END_S = 5.0


def run(setting: Setting, shape: str) -> None:
    """Measure and report after each round."""
    # The engine runs in this process, so that the figures include no communication.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM

    llm = LLM(
        model=str(setting.checkpoint(shape)),
        dtype=setting.dtype,
        max_model_len=MAX_MODEL_LEN,
        enable_sleep_mode=not setting.is_emulated,
        enforce_eager=True,  # CUDA graphs do not affect sleep
        gpu_memory_utilization=0.5 if setting.is_emulated else 0.05,
        kv_cache_memory_bytes=_DRY_KV_BYTES if setting.is_dry else _KV_BYTES,
    )
    before = _tokens(llm)
    with setting.turn():
        _measure(setting, shape, llm)
        if not setting.is_emulated:
            _measure_level_2(setting, shape, llm)
    if _tokens(llm) != before:
        raise Failed("vLLM answers otherwise after it has slept")


def _measure(setting: Setting, shape: str, llm: LLM) -> None:
    sleeps_s: list[float] = []
    wakes_s: list[float] = []
    for index in range(_WARM_UP + _ROUNDS):
        began_s = time.perf_counter()
        llm.sleep(level=1)
        asleep_s = time.perf_counter()
        llm.wake_up()
        awake_s = time.perf_counter()
        if index >= _WARM_UP:
            sleeps_s.append(asleep_s - began_s)
            wakes_s.append(awake_s - asleep_s)
            found = sleep_figures(shape, sleeps_s, wakes_s)
            setting.report.add(found, sleeps_s=sleeps_s, wakes_s=wakes_s)
        if sleeps_s and setting.left_s < _END_S + 2 * (awake_s - began_s):
            break


def _measure_level_2(setting: Setting, shape: str, llm: LLM) -> None:
    rounds_s: list[float] = []
    for index in range(_WARM_UP + _LEVEL_2_ROUNDS):
        began_s = time.perf_counter()
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights")
        taken_s = time.perf_counter() - began_s
        if index >= _WARM_UP:
            rounds_s.append(taken_s)
            figure = figures.measured(median(rounds_s))
            name = f"{shape}_sleep_level_2_and_wake_p50_s"
            setting.report.add({name: figure}, level_2_rounds_s=rounds_s)
        if setting.left_s < _END_S + 2 * taken_s:
            break


def sleep_figures(
    shape: str, sleeps_s: Sequence[float], wakes_s: Sequence[float]
) -> dict[str, figures.Figure]:
    """Medians of each, and of both together."""
    both_s = [sleep_s + wake_s for sleep_s, wake_s in zip(sleeps_s, wakes_s, strict=True)]
    return {
        f"{shape}_sleep_p50_s": figures.measured(median(sleeps_s)),
        f"{shape}_wake_p50_s": figures.measured(median(wakes_s)),
        f"{shape}_sleep_and_wake_p50_s": figures.measured(median(both_s)),
    }


def _tokens(llm: LLM) -> list[int]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    [answer] = llm.generate({"prompt_token_ids": _PROMPT}, sampling, use_tqdm=False)
    return list(answer.outputs[0].token_ids)


if __name__ == "__main__":
    sys.exit(shape_main(__doc__, run))
