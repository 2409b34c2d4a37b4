"""`make demo`: four models on one small GPU, switched between tokens, every answer checked.

Makes four tiny checkpoints, starts a daemon whose only device holds the weights
of one and a half of them, registers them through the command line, streams 32
chat requests at once with the official OpenAI client, and compares every greedy
answer with the same prompt run alone. Any differing token is a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gpupool_cli.private_daemon import PrivateDaemon, private_daemon
from gpupoold.admin.models import Ps
from gpupoold.config import default_devices
from gpupoold.domain import Targets
from gpupoold.units import format_bytes, format_duration

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
NUM_REQUESTS = 32
MAX_TOKENS = 64
WEIGHTS = "16MB"
MAX_LEN = 512
TTFT, TBT = "10s", "100ms"
TARGETS = Targets(10.0, 0.1)
QUESTIONS = (
    "What is the capital of a country that starts with the letter {letter}?",
    "Write a short poem about the number {number}.",
    "Explain to a child why {number} is larger than {letter}.",
    "List {number} things that begin with {letter}.",
)


@dataclass(slots=True)
class Answer:
    """One streamed answer as its client saw it."""

    model: str
    prompt: str
    asked_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        times = self.token_times_s
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def num_in_time(self) -> int:
        due = (TARGETS.deadline_s(self.asked_s, i) for i in range(len(self.token_times_s)))
        return sum(at <= limit for at, limit in zip(self.token_times_s, due, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--svg", type=Path, help="also save what was printed as a picture")
    picture: Path | None = parser.parse_args().svg
    console = Console(record=picture is not None, width=88 if picture else None, highlight=False)
    status = run(console)
    if picture is not None:
        console.save_svg(str(picture), title="make demo")
    return status


def run(console: Console) -> int:
    folder = BUILD / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    models = make_models(console)
    on_gpu = default_devices()[0]["kind"] == "cuda"
    console.print(
        "[bold]2.[/] start gpupoold" + (" on the GPU" if on_gpu else f": {device_text()}")
    )
    config = "" if on_gpu else emulated_config()
    with private_daemon(config, folder) as daemon:
        for name, path in models.items():
            register(console, daemon, name, path)
        result = asyncio.run(ask_everything(console, daemon, list(models)))
    BUILD.mkdir(exist_ok=True)
    (BUILD / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    return report(console, result)


def make_models(console: Console) -> dict[str, Path]:
    console.print(f"[bold]1.[/] four tiny checkpoints of about {WEIGHTS} each, in float32")
    folder = BUILD / "demo-models"
    gpupool(["make-tiny-models", str(folder), "--size", WEIGHTS])
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}


def emulated_config() -> str:
    return f'[[device]]\nkind = "emulated"\nmemory = {device_bytes()}\n'


def device_bytes() -> int:
    """One and a half of the largest checkpoint's weights."""
    sizes = [
        sum(file.stat().st_size for file in path.glob("*.safetensors"))
        for path in (BUILD / "demo-models").iterdir()
    ]
    return int(1.5 * max(sizes))


def device_text() -> str:
    return f"one emulated GPU of {format_bytes(device_bytes())}, for models of {WEIGHTS} each"


def register(console: Console, daemon: PrivateDaemon, name: str, path: Path) -> None:
    options = ["--ttft", TTFT, "--tbt", TBT, "--max-len", str(MAX_LEN), "--dtype", "float32"]
    started_s = time.monotonic()
    gpupool(["add-model", name, "--source", str(path), *options], daemon.socket_path)
    took = format_duration(time.monotonic() - started_s)
    console.print(f"   gpupool add-model {name} --ttft {TTFT} --tbt {TBT}  [dim]({took})[/]")


def gpupool(arguments: Sequence[str], socket_path: Path | None = None) -> None:
    """Run the command line as a user would."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if socket_path is not None:
        environment["GPUPOOL_SOCKET"] = str(socket_path)
    command = [sys.executable, "-m", "gpupool_cli.main", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"gpupool {' '.join(arguments)}: {done.stderr.strip()}")


async def ask_everything(
    console: Console, daemon: PrivateDaemon, models: list[str]
) -> dict[str, Any]:
    client = AsyncOpenAI(base_url=f"{daemon.http_url}/v1", api_key="none", max_retries=0)
    prompts = make_prompts(models)
    console.print(f"[bold]3.[/] {NUM_REQUESTS} chat requests, each alone, for reference")
    alone = await with_progress(console, lambda tick: one_by_one(client, prompts, tick))
    before = daemon_ps(daemon)
    console.print(f"[bold]4.[/] the same {NUM_REQUESTS} at once over {len(models)} models")
    started_s = time.monotonic()
    together = await with_progress(console, lambda tick: all_at_once(client, prompts, tick))
    seconds = time.monotonic() - started_s
    return summarise(alone, together, before, daemon_ps(daemon), seconds)


def make_prompts(models: list[str]) -> list[Answer]:
    return [
        Answer(
            models[index % len(models)],
            QUESTIONS[index % len(QUESTIONS)].format(
                number=index + 2, letter="abcdefghijklmnopqrstuvwxyz"[index % 26]
            ),
        )
        for index in range(NUM_REQUESTS)
    ]


Tick = Callable[[], None]


async def with_progress(
    console: Console, work: Callable[[Tick], Awaitable[list[Answer]]]
) -> list[Answer]:
    columns = (TextColumn("  "), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=NUM_REQUESTS * MAX_TOKENS)
        return await work(lambda: progress.advance(task))


async def one_by_one(client: AsyncOpenAI, prompts: list[Answer], tick: Tick) -> list[Answer]:
    return [await ask(client, prompt, tick) for prompt in prompts]


async def all_at_once(client: AsyncOpenAI, prompts: list[Answer], tick: Tick) -> list[Answer]:
    return await asyncio.gather(*(ask(client, prompt, tick) for prompt in prompts))


async def ask(client: AsyncOpenAI, prompt: Answer, tick: Tick) -> Answer:
    answer = Answer(prompt.model, prompt.prompt, time.monotonic())
    stream = await client.chat.completions.create(
        model=prompt.model,
        messages=[{"role": "user", "content": prompt.prompt}],
        max_completion_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for chunk in stream:
        for choice in chunk.choices:
            token_ids = (choice.model_extra or {}).get("token_ids") or []
            answer.token_ids.extend(token_ids)
            answer.token_times_s.extend([time.monotonic()] * len(token_ids))
            for _ in token_ids:
                tick()
    return answer


def daemon_ps(daemon: PrivateDaemon) -> Ps:
    with daemon.client() as client:
        return client.ps()


def summarise(
    alone: list[Answer], together: list[Answer], before: Ps, after: Ps, seconds: float
) -> dict[str, Any]:
    stages = {
        stage: after.switch_seconds[stage] - before.switch_seconds[stage]
        for stage in after.switch_seconds
    }
    return {
        "requests": len(together),
        "completed": sum(len(answer.token_ids) == MAX_TOKENS for answer in together),
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


def num_differing(alone: Answer, together: Answer) -> int:
    pairs = zip(alone.token_ids, together.token_ids, strict=False)
    missing = abs(len(alone.token_ids) - len(together.token_ids))
    return sum(one != other for one, other in pairs) + missing


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


def report(console: Console, result: dict[str, Any]) -> int:
    console.print(models_table(result["models"]))
    console.print(device_table(result))
    differing, completed = result["differing_tokens"], result["completed"]
    good = differing == 0 and completed == result["requests"]
    style = "green" if good else "red"
    console.print(
        f"[{style}]{completed} of {result['requests']} answers complete in "
        f"{format_duration(result['seconds'])}; {differing} tokens differ from the same "
        f"prompts run alone.[/]\nThe figures are in build/demo.json."
    )
    return 0 if good else 1


def models_table(models: dict[str, dict[str, Any]]) -> Table:
    table = new_table(f"per model; targets: first token in {TTFT}, then {TBT} per token")
    table.add_column("model", no_wrap=True)
    for title in ("asked", "tokens", "TTFT p50", "p99", "TBT p50", "p99", "in time"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, row in models.items():
        keys = ("ttft_p50_s", "ttft_p99_s", "tbt_p50_s", "tbt_p99_s")
        times = [format_duration(row[key]) for key in keys]
        share = f"{row['attainment']:.1%}"
        table.add_row(name, str(row["requests"]), str(row["tokens"]), *times, share)
    return table


def device_table(result: dict[str, Any]) -> Table:
    table = new_table("the device; seconds of all switches by stage")
    stages = result["switch_seconds"]
    for title in ("switches", "moved", *stages):
        table.add_column(title, justify="right", no_wrap=True)
    moved = format_bytes(result["bytes_moved"])
    times = [format_duration(seconds) for seconds in stages.values()]
    table.add_row(str(result["switches"]), moved, *times)
    return table


def new_table(title: str) -> Table:
    return Table(
        title=title,
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )


if __name__ == "__main__":
    raise SystemExit(main())
