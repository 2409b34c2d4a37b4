"""Act one: 32 answers at once over four models on one device, switched between tokens."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.private_daemon import PrivateDaemon
from examples.demo.answers import Answer, OnToken, ask, make_prompts, num_differing, open_api
from examples.demo.setting import TBT, TTFT, daemon_ps, new_table, on_gpu
from gpupoold.api.schemas import Ps
from gpupoold.units import format_bytes, format_duration

NUM_REQUESTS = 32
NUM_TOKENS = 64
TITLES = ("asked", "tokens", "first\np50", "token\np99", "next\np50", "token\np99", "in time")
REAL_SWITCH = (
    "[dim]These models are tiny. On an H200 a switch to a model of 8 billion parameters takes "
    "about 0.3 s (docs/internals/gpu.md).[/]\n"
)


async def play(console: Console, daemon: PrivateDaemon, models: list[str]) -> dict[str, Any]:
    prompts = make_prompts(models, NUM_REQUESTS)
    async with open_api(daemon) as client:
        console.print(
            f"[bold]3.[/] {NUM_REQUESTS} chat requests one after the other: the expected answers"
        )
        alone = await with_progress(console, lambda tick: one_by_one(client, prompts, tick))
        before = daemon_ps(daemon)
        console.print(
            f"[bold]4.[/] the same {NUM_REQUESTS} requests at once, to {len(models)} models that "
            "take turns on one GPU"
        )
        started_s = time.monotonic()
        together = await with_progress(console, lambda tick: all_at_once(client, prompts, tick))
        seconds = time.monotonic() - started_s
    return summarise(alone, together, before, daemon_ps(daemon), seconds)


async def with_progress(
    console: Console, work: Callable[[OnToken], Awaitable[list[Answer]]]
) -> list[Answer]:
    columns = (TextColumn("  "), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=NUM_REQUESTS * NUM_TOKENS)
        return await work(lambda _: progress.advance(task))


async def one_by_one(client: AsyncOpenAI, prompts: list[Answer], tick: OnToken) -> list[Answer]:
    return [await ask(client, prompt, NUM_TOKENS, tick) for prompt in prompts]


async def all_at_once(client: AsyncOpenAI, prompts: list[Answer], tick: OnToken) -> list[Answer]:
    return await asyncio.gather(*(ask(client, prompt, NUM_TOKENS, tick) for prompt in prompts))


def summarise(
    alone: list[Answer], together: list[Answer], before: Ps, after: Ps, seconds: float
) -> dict[str, Any]:
    stages = {
        stage: after.switch_seconds[stage] - before.switch_seconds[stage]
        for stage in after.switch_seconds
    }
    return {
        "requests": len(together),
        "completed": sum(len(answer.token_ids) == NUM_TOKENS for answer in together),
        "differing_tokens": sum(map(num_differing, alone, together)),
        "switches": after.num_switches - before.num_switches,
        "bytes_moved": after.switched_bytes - before.switched_bytes,
        "seconds": seconds,
        "switch_seconds": stages,
        "models": {
            name: model_summary([answer for answer in together if answer.model == name])
            for name in sorted({answer.model for answer in together})
        },
    }


def model_summary(answers: list[Answer]) -> dict[str, Any]:
    ttfts_s = [answer.ttft_s for answer in answers]
    gaps_s = [gap for answer in answers for gap in answer.gaps_s]
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    return {
        "requests": len(answers),
        "tokens": num_tokens,
        "attainment": sum(answer.num_in_time for answer in answers) / max(1, num_tokens),
        "ttft_p50_s": statistics.median(ttfts_s),
        "ttft_p99_s": quantile(ttfts_s, 0.99),
        "tbt_p50_s": statistics.median(gaps_s),
        "tbt_p99_s": quantile(gaps_s, 0.99),
    }


def quantile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def report(console: Console, result: dict[str, Any]) -> bool:
    """Print the result; return whether every answer is complete and correct."""
    console.print(models_table(result["models"]))
    console.print(
        f"[dim]In time: the first token within {TTFT}, the n-th further one within {TTFT} + n x "
        f"{TBT}. An answer pauses while another model has its turn, and is ahead of its deadlines "
        f"then; so the p99 between tokens may be above {TBT} although every token is in time.[/]"
        "\n"
    )
    console.print(device_table(result))
    if not on_gpu():
        console.print(REAL_SWITCH)
    differing, completed = result["differing_tokens"], result["completed"]
    is_good = bool(differing == 0 and completed == result["requests"])
    style = "green" if is_good else "red"
    console.print(
        f"[{style}]{completed} of {result['requests']} answers complete in "
        f"{format_duration(result['seconds'])}; {differing} tokens differ from the same "
        "prompts run alone.[/]\n"
    )
    return is_good


def models_table(models: dict[str, dict[str, Any]]) -> Table:
    table = new_table("what clients saw: time to the first token, and between tokens")
    table.add_column("model", no_wrap=True)
    for title in TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    for name, row in models.items():
        keys = ("ttft_p50_s", "ttft_p99_s", "tbt_p50_s", "tbt_p99_s")
        times = [format_duration(row[key]) for key in keys]
        share = f"{row['attainment']:.1%}"
        table.add_row(name, str(row["requests"]), str(row["tokens"]), *times, share)
    return table


def device_table(result: dict[str, Any]) -> Table:
    table = new_table("switches between models, and their time by stage")
    stages = result["switch_seconds"]
    for title in ("switches", "moved", *stages):
        table.add_column(title, justify="right", no_wrap=True)
    moved = format_bytes(result["bytes_moved"])
    times = [format_duration(seconds) for seconds in stages.values()]
    table.add_row(str(result["switches"]), moved, *times)
    return table
