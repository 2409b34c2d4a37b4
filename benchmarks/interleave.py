"""Answers of models that share a device: ``python -m benchmarks.interleave``.

An answer runs; then the other models get a request each. Two, three and four models are resident;
the last two are not, and are not judged. Writes ``build/bench-interleave.json``; exit code 1 when a
figure was missed. The targets are long, so nothing but the turns makes an answer pause.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.bench.rig import emulated_config, make_checkpoints, weight_bytes
from benchmarks.load import Ask, Stream, ask, client_of, prompt_token_ids
from benchmarks.private_daemon import private_daemon
from benchmarks.report import at_least, at_most, finish

MODEL_BYTES = 20_000_000
TTFT_S, TBT_S = 10.0, 0.1
PROMPT_TOKENS = 200
_ALONE_TOKENS, _SHARED_TOKENS = 150, 250
_NUM_TRIALS = 3
_PAUSE_S = 0.06
_FIRST_S = 0.02  # beside a step and the prompt
_RATE = 0.97


class Case(NamedTuple):
    """Models on a device of ``room`` times the weights of one, for weights and KV.

    Judged where all are resident.
    """

    num_models: int
    room: float

    @property
    def name(self) -> str:
        return f"{self.num_models}_models_on_{self.room:g}"

    @property
    def is_judged(self) -> bool:
        return self.room > self.num_models


CASES = (Case(2, 3.8), Case(3, 4.8), Case(4, 5.8), Case(2, 1.7))


def main() -> int:
    """Run everything; exit code 1 when a figure was missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.interleave")
    parser.add_argument("--out", type=Path, default=Path("build/bench-interleave.json"))
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    runs: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="gpupool-interleave-") as name:
        [path] = make_checkpoints(Path(name), ["llama"], MODEL_BYTES)
        for case in CASES:
            num_bytes = int(case.room * weight_bytes(path))
            found = runs[case.name] = trials(path, case.num_models, num_bytes)
            figures |= _judged(case, found)
    return finish(arguments.out, figures, runs=runs)


def _judged(case: Case, found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of the trials beside their limits."""
    middle = {key: median(trial[key] for trial in found) for key in found[0]}
    pause_s, first_s = _PAUSE_S, middle["step_s"] + middle["prompt_s"] + _FIRST_S
    rate = _RATE * middle["alone_tokens_per_s"]
    if not case.is_judged:
        pause_s, first_s, rate = math.inf, math.inf, -math.inf
    return {
        f"{case.name}_pause_s": at_most(middle["pause_s"], pause_s),
        f"{case.name}_first_s": at_most(middle["first_s"], first_s),
        f"{case.name}_tokens_per_s": at_least(middle["shared_tokens_per_s"], rate),
    }


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
