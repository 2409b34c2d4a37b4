"""Answers of models that share a device: ``python -m benchmarks.interleave``.

An answer runs; then the other models get a request each. Two, three and four models are resident;
the last two are not. Writes ``build/bench-interleave.json``; exit code 1 when a figure was missed.
The targets are long, so nothing but the turns makes an answer pause.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.rig import emulated_config, make_checkpoints, weight_bytes
from benchmarks.load import Ask, Stream, ask, client_of, prompt_token_ids
from benchmarks.private_daemon import private_daemon
from benchmarks.report import at_least, at_most, finish

MODEL_BYTES = 20_000_000
TTFT_S, TBT_S = 10.0, 0.1
PROMPT_TOKENS = 200
_ALONE_TOKENS, _SHARED_TOKENS = 150, 250
_KV_BYTES = 8 << 20
_ROOM = {"2": 2.2, "3": 3.2, "4": 4.2, "2, not resident": 1.3}  # models on the device
_NUM_TRIALS = 3
_PAUSE_S = 0.06
_FIRST_S = 0.02  # beside a step and the prompt
_RATE = 0.97


def main() -> int:
    """Run everything; exit code 1 when a figure was missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.interleave")
    parser.add_argument("--out", type=Path, default=Path("build/bench-interleave.json"))
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {}
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gpupool-interleave-") as name:
        [path] = make_checkpoints(Path(name), ["llama"], MODEL_BYTES)
        for case, room in _ROOM.items():
            num_bytes = int(room * weight_bytes(path)) + _KV_BYTES
            runs[case] = trials(path, int(case[0]), num_bytes)
            print(case, *(f"{key} {value:.4f}" for key, value in runs[case][-1].items()))
    for case, found in runs.items():
        best = {key: sorted(trial[key] for trial in found)[len(found) // 2] for key in found[0]}
        first_s = best["step_s"] + best["prompt_s"] + _FIRST_S
        limits = case.isdigit()
        figures |= {
            f"{case}_pause_s": at_most(best["pause_s"], _PAUSE_S if limits else TTFT_S),
            f"{case}_first_s": at_most(best["first_s"], first_s if limits else TTFT_S),
            f"{case}_tokens_per_s": at_least(
                best["shared_tokens_per_s"], (_RATE if limits else 0.0) * best["alone_tokens_per_s"]
            ),
        }
    return finish(arguments.out, figures, runs=runs)


def trials(path: Path, num_models: int, num_bytes: int) -> list[dict[str, float]]:
    """Start a daemon with models on one device; return what each trial measured."""
    names = [f"m{number}" for number in range(num_models)]
    with private_daemon(emulated_config(num_bytes)) as daemon:
        for name in names:
            daemon.add_model(
                name, path, dtype="float32", ttft_s=TTFT_S, tbt_s=TBT_S, max_model_len=1024
            )
        return asyncio.run(_trials(daemon.http_url, names))


async def _trials(url: str, names: Sequence[str]) -> list[dict[str, float]]:
    async with client_of(url) as client:
        prompts = itertools.count(1)

        async def run(name: str, num_tokens: int) -> tuple[float, Stream]:
            prompt = prompt_token_ids(next(prompts), PROMPT_TOKENS)
            begun_s = asyncio.get_running_loop().time()
            stream = await ask(client, Ask(name, 0, num_tokens), prompt)
            assert stream.is_complete, stream.problem
            return begun_s, stream

        found = []
        for number in range(_NUM_TRIALS + 1):
            alone = [await run(name, _ALONE_TOKENS) for name in names]
            first = asyncio.create_task(run(names[0], _SHARED_TOKENS))
            await asyncio.sleep(0.4)
            others = await asyncio.gather(*(run(name, _SHARED_TOKENS) for name in names[1:]))
            if number:  # the first trial warms up
                found.append(_figures(alone, [await first, *others]))
            else:
                await first
        return found


def _figures(
    alone: Sequence[tuple[float, Stream]], shared: Sequence[tuple[float, Stream]]
) -> dict[str, float]:
    """Return the figures of a trial; the shared time is that in which all answers run."""
    from_s = max(stream.times_s[0] for _, stream in shared)
    until_s = min(stream.times_s[-1] for _, stream in shared)
    newcomers = shared[1:]
    times_s = [[at_s for at_s in stream.times_s if at_s >= newcomers[0][0]] for _, stream in shared]
    pauses_s = [
        later - sooner
        for one in times_s
        for sooner, later in itertools.pairwise(at_s for at_s in one if at_s <= until_s)
    ]
    num_tokens = sum(from_s <= at_s <= until_s for one in times_s for at_s in one)
    rates = [
        (len(stream.times_s) - 1) / (stream.times_s[-1] - stream.times_s[0]) for _, stream in alone
    ]
    return {
        "pause_s": max(pauses_s),
        "first_s": max(stream.times_s[0] - begun_s for begun_s, stream in newcomers),
        "prompt_s": sum(stream.times_s[0] - begun_s for begun_s, stream in alone) / len(alone),
        "step_s": len(rates) / sum(rates),
        "alone_tokens_per_s": sum(rates) / len(rates),
        "shared_tokens_per_s": num_tokens / (until_s - from_s),
    }


if __name__ == "__main__":
    sys.exit(main())
