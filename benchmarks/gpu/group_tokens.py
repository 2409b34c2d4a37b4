"""Tokens of a group of GPUs beside vLLM alone with the same tensor parallelism.

Two models take turns on a group with room for one and a fraction, so every request needs a switch.
Each request is alone: both servers compute the same batches, and every token has to be the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.overhead import EMULATED_OPTIONS, vllm_serve
from benchmarks.gpu import figures
from benchmarks.gpu.rig import Setting, add_timed, arguments, setting_of
from benchmarks.load import Ask, Stream, ask, client_of
from gpupoold.worker.process import set_group_environment

_SHAPES = ("1B", "3B")
_ROOM = 1.2  # of the larger model's weights
_MAX_MODEL_LEN = 1024
_NUM_PROMPTS = 12
_NUM_TOKENS = 64
_DRY_NUM_PROMPTS = 3
_DRY_NUM_TOKENS = 24
_VLLM_KV_BYTES = 1 << 30
# Turned off by gpupool, because it adds in another order.
_NO_FUSION = json.dumps({"pass_config": {"fuse_allreduce_rms": False}})
_SEQUENCES = 64  # as in a daemon that starts quickly: the same graphs


def run(setting: Setting) -> None:
    """Measure and report."""
    set_group_environment()  # of vLLM alone too: the same all-reduces
    num_prompts = _DRY_NUM_PROMPTS if setting.is_dry else _NUM_PROMPTS
    num_tokens = _DRY_NUM_TOKENS if setting.is_dry else _NUM_TOKENS
    checkpoints = {name: setting.checkpoint(name) for name in _SHAPES}
    asks = [
        Ask(path.name, prompt, num_tokens)
        for prompt in range(num_prompts)
        for path in checkpoints.values()
    ]
    config = setting.device(int(_ROOM * max(map(setting.weight_bytes, _SHAPES))), 4 << 20)
    config += f"[memory]\nmodel_cache = {setting.model_cache_bytes(_SHAPES)}\n"
    with setting.daemon(config, starts_quickly=True) as daemon:
        for path in checkpoints.values():
            add_timed(setting, daemon, path.name, path, _MAX_MODEL_LEN)
        ours = asyncio.run(_answers(daemon.http_url, asks))
        with daemon.client() as client:
            num_switches = client.ps().num_switches
    theirs: list[Stream] = []
    for path in checkpoints.values():
        theirs += _of_vllm(setting, path, [one for one in asks if one.model == path.name])
    found = token_figures(setting.label("tokens"), ours, theirs, num_switches)
    setting.report.add(found, tokens=_details(ours, theirs))


def token_figures(
    label: str, ours: Sequence[Stream], theirs: Sequence[Stream], num_switches: int
) -> dict[str, figures.Figure]:
    """The figures of the same requests to both, in any order."""
    expected = {stream.ask: stream for stream in theirs}
    differing = [one for one in ours if one.token_ids != expected[one.ask].token_ids]
    incomplete = [one for one in (*ours, *theirs) if not one.is_complete]
    return {
        f"{label}_compared": figures.at_least(sum(len(one.token_ids) for one in ours), 1),
        f"{label}_answers_differing": figures.at_most(len(differing), 0),
        f"{label}_answers_incomplete": figures.at_most(len(incomplete), 0),
        f"{label}_switches": figures.at_least(num_switches, len(ours) - 1),
    }


async def _answers(http_url: str, asks: Sequence[Ask]) -> list[Stream]:
    """One request after the other."""
    async with client_of(http_url) as client:
        return [await ask(client, one) for one in asks]


def _of_vllm(setting: Setting, path: Path, asks: Sequence[Ask]) -> list[Stream]:
    options: tuple[str, ...] = ("--tensor-parallel-size", str(setting.num_gpus))
    if setting.is_emulated:
        options += EMULATED_OPTIONS
    else:
        options += ("--gpu-memory-utilization", "0.05")
        options += ("--kv-cache-memory-bytes", str(_VLLM_KV_BYTES))
        options += ("--max-num-seqs", str(_SEQUENCES), "--compilation-config", _NO_FUSION)
        options += ("--max-cudagraph-capture-size", str(_SEQUENCES))
    log_path = setting.folder / f"vllm-{path.name}.log"
    with contextlib.ExitStack() as stack:
        serving = (path, _MAX_MODEL_LEN, setting.dtype, options, log_path)
        url = stack.enter_context(vllm_serve(*serving))
        return asyncio.run(_answers(url, asks))


def _details(ours: Sequence[Stream], theirs: Sequence[Stream]) -> list[dict[str, Any]]:
    """The answers that differ, and where; and what went wrong."""
    expected = {stream.ask: stream for stream in theirs}
    rows: list[dict[str, Any]] = []
    for one in ours:
        other = expected[one.ask]
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        at = next((i for i, (mine, its) in enumerate(pairs) if mine != its), None)
        if at is not None or one.problem or other.problem:
            problems = [text for text in (one.problem, other.problem) if text]
            row = {"model": one.ask.model, "prompt": one.ask.prompt, "first_differing": at}
            rows.append(row | {"problems": problems})
    return rows


def main() -> int:
    """Run it; see the module."""
    run(setting_of(arguments(__doc__).parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
