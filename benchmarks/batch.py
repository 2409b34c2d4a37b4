"""Batches beneath an interactive load: ``python -m benchmarks.batch``.

A private daemon has one simulated A10 and three models of 7B, of which the device holds one and a
third. Two models have interactive requests (Poisson arrivals, ShareGPT lengths), first alone, then
with a batch of ``--requests`` requests for two models, one of the two and the third. Another batch
is answered while the daemon is killed three times. Writes ``build/bench-batch.json``; exit code 1
when a figure was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from openai import AsyncOpenAI
from openai.types import Batch

from benchmarks.load import client_of
from benchmarks.private_daemon import PrivateDaemon, private_daemon
from benchmarks.report import at_least, at_most, finish
from benchmarks.sim_devices import CappedLengths, add_models, send_all, sim_config
from gpupoold.domain import Targets
from gpupoold.sim.boxes import parse_box
from gpupoold.sim.workloads import SimRequest, equal_rates, poisson_workload

MODELS = ("chat-a", "chat-b", "nightly")
INTERACTIVE, BATCHED = MODELS[:2], MODELS[1:]
SHAPES = ("Qwen2.5-7B",)
ENDPOINT: Literal["/v1/completions"] = "/v1/completions"
NUM_KILLS = 3
_FRESH_S = 2.5  # the daemon's use of the GPUs is as old as that at most
_ENDED = ("completed", "failed", "expired", "cancelled")


def main() -> int:
    """Run everything; exit code 1 when a figure was missed."""
    arguments = _parse()
    box = parse_box("1xA10")
    lengths = CappedLengths(1024, 256)
    rates = equal_rates(list(INTERACTIVE), arguments.rps / len(INTERACTIVE))
    arrivals = poisson_workload(rates, arguments.duration, lengths, arguments.seed)
    with tempfile.TemporaryDirectory(prefix="gpupool-batch-") as name:
        folder = Path(name)
        with private_daemon(sim_config(box), folder / "pool") as daemon:
            add_models(daemon, MODELS, folder, Targets(), SHAPES)
            alone = asyncio.run(_loaded(daemon, arrivals, None))
            lines = _lines(arguments.requests, arguments.max_tokens)
            beside = asyncio.run(_loaded(daemon, arrivals, lines))
        killed = _killed(sim_config(box), folder / "pool", _lines(arguments.requests, 64))
    idle_s = alone["wall_s"] - alone["busy_s"]
    unused_s = max(beside["wall_s"] - beside["busy_s"], 0.0)
    figures = {
        "attainment_lost": at_most(alone["attainment"] - beside["attainment"], 0.005),
        "idle_time_used": at_least(1 - unused_s / idle_s, 0.9),
        "interactive_errors": at_most(alone["errors"] + beside["errors"], 0),
        "answers_of_the_batch": at_least(beside["num_answers"], arguments.requests),
        "answers_after_kills": at_least(killed["num_answers"], arguments.requests),
        "answered_twice": at_most(killed["num_twice"], 0),
    }
    return finish(arguments.out, figures, alone=alone, beside=beside, killed=killed)


async def _loaded(
    daemon: PrivateDaemon, arrivals: Sequence[SimRequest], lines: Sequence[str] | None
) -> dict[str, Any]:
    """Send the interactive load, beside a batch if there are ``lines``, and count."""
    async with client_of(daemon.http_url) as api:
        batch = None if lines is None else await _begin(api, lines)
        if batch is not None:
            batch = await _until(api, batch, lambda one: _num_done(one) > 0)
        await asyncio.sleep(_FRESH_S)
        before, begun_s = _counts(daemon), time.monotonic()
        sent = await send_all(daemon.http_url, arrivals, 0, 0.2)
        await asyncio.sleep(_FRESH_S)
        wall_s = time.monotonic() - begun_s
        after = _counts(daemon)
        moved = {name: after[name] - before[name] for name in before}
        found: dict[str, Any] = {"wall_s": wall_s, "busy_s": moved["busy_s"]}
        found["attainment"] = moved["in_time"] / moved["tokens"]
        found["errors"] = sent.errors.total()
        if batch is not None:
            batch = await api.batches.retrieve(batch.id)
            found["batch_was_under_way"] = batch.status == "in_progress"
            found["batch_answers_beside_the_load"] = _num_done(batch)
            batch = await _until(api, batch, lambda one: one.status in _ENDED)
            found["num_answers"] = sum((await _answers(api, batch)).values())
            found["batch_s"] = (batch.completed_at or 0) - batch.created_at
    return found


def _killed(config: str, folder: Path, lines: Sequence[str]) -> dict[str, Any]:
    """Answer a batch while the daemon is killed again and again."""
    batch: Batch | None = None
    done_at_kills = []
    for number in range(NUM_KILLS + 1):
        with private_daemon(config, folder) as daemon:
            is_last = number == NUM_KILLS
            batch = asyncio.run(_share(daemon, lines, batch, None if is_last else number + 1))
            if is_last:
                answers = asyncio.run(_answers_of(daemon, batch))
                break
            done_at_kills.append(_num_done(batch))
            os.kill(daemon.process.pid, signal.SIGKILL)
            daemon.process.wait()
    return {
        "done_at_kills": done_at_kills,
        "num_answers": len(answers),
        "num_twice": sum(count - 1 for count in answers.values()),
    }


async def _share(
    daemon: PrivateDaemon, lines: Sequence[str], batch: Batch | None, quarters: int | None
) -> Batch:
    """Wait until some quarters of the batch are answered, or the end; create the batch first."""
    async with client_of(daemon.http_url) as api:
        if batch is None:
            batch = await _begin(api, lines)
        enough = len(lines) if quarters is None else len(lines) * quarters // (NUM_KILLS + 1)
        return await _until(
            api,
            batch,
            lambda one: one.status in _ENDED if quarters is None else _num_done(one) >= enough,
        )


async def _answers_of(daemon: PrivateDaemon, batch: Batch) -> Counter[str]:
    async with client_of(daemon.http_url) as api:
        return await _answers(api, batch)


async def _begin(api: AsyncOpenAI, lines: Sequence[str]) -> Batch:
    file = await api.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return await api.batches.create(
        input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h"
    )


async def _until(api: AsyncOpenAI, batch: Batch, is_enough: Any) -> Batch:
    while not is_enough(batch):
        await asyncio.sleep(0.2)
        batch = await api.batches.retrieve(batch.id)
    return batch


async def _answers(api: AsyncOpenAI, batch: Batch) -> Counter[str]:
    """Return how often each request is in the output file."""
    assert batch.output_file_id is not None, batch
    content = await api.files.content(batch.output_file_id)
    return Counter(json.loads(line)["custom_id"] for line in content.text.splitlines())


def _num_done(batch: Batch) -> int:
    return batch.request_counts.completed if batch.request_counts else 0


def _counts(daemon: PrivateDaemon) -> dict[str, float]:
    with daemon.client() as client:
        rows, devices = client.ps().models, client.usage(10 * 3600).devices
    return {
        "tokens": sum(row.tokens for row in rows),
        "in_time": sum(row.tokens_in_time for row in rows),
        "busy_s": sum(one.computing_s + one.switching_s for one in devices),
    }


def _lines(num_requests: int, max_tokens: int) -> list[str]:
    lines = []
    for number in range(num_requests):
        body = {
            "model": BATCHED[number % len(BATCHED)],
            "prompt": [300 + (number * 7 + k) % 1700 for k in range(200)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        line = {"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body}
        lines.append(json.dumps(line))
    return lines


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.batch")
    parser.add_argument("--requests", type=int, default=500, help="of each batch")
    parser.add_argument("--max-tokens", type=int, default=400, help="of the batch beside the load")
    parser.add_argument("--rps", type=float, default=0.12, help="interactive requests per second")
    parser.add_argument("--duration", type=float, default=150.0, help="seconds of arrivals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/bench-batch.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
