"""Act two: a worker process is killed in the middle of answers, and no answer is lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from benchmarks.private_daemon import PrivateDaemon
from examples.demo.answers import Answer, ask, make_prompts, num_differing, open_api
from examples.demo.bars import Bars
from examples.demo.setting import bring_back, daemon_ps, new_table
from gpupoold.api.schemas import RequestInfo
from gpupoold.errors import TimedOut
from gpupoold.units import format_duration

NUM_MODELS = 2
NUM_REQUESTS = 6
NUM_TOKENS = 400
KILL_AFTER_TOKENS = NUM_REQUESTS * NUM_TOKENS // 4
LOOK_EVERY_S = 0.1
POLL_S = 0.02
BACK_TIMEOUT_S = 120.0
ON_KILLED, ELSEWHERE = "the killed one", "another GPU's"


@dataclass(frozen=True, slots=True)
class Kill:
    """A killed worker process: its time, the requests running then, the time to the replacement."""

    device: int
    pid: int
    at_s: float
    requests: list[RequestInfo]
    back_s: float

    def hit(self, answer: Answer) -> bool:
        return any(answer.is_of(request) for request in self.requests)


async def play(console: Console, daemon: PrivateDaemon, models: list[str]) -> dict[str, Any]:
    bring_back(console, daemon)
    prompts = make_prompts(models[:NUM_MODELS], NUM_REQUESTS)
    async with open_api(daemon) as client:
        console.print(
            f"[bold]6.[/] {NUM_REQUESTS} longer answers without a fault: the expected answers"
        )
        bars = Bars(console, prompts, NUM_TOKENS)
        undisturbed = await answer_all(client, daemon, prompts, bars)
        console.print("[bold]7.[/] the same again; meanwhile the worker process of a GPU is killed")
        bars = Bars(console, prompts, NUM_TOKENS)
        killing = asyncio.create_task(kill_one(console, daemon, bars))
        disturbed = await answer_all(client, daemon, prompts, bars)
        kill = await killing
    return summarise(undisturbed, disturbed, kill)


async def answer_all(
    client: AsyncOpenAI, daemon: PrivateDaemon, prompts: Sequence[Answer], bars: Bars
) -> list[Answer]:
    with bars.progress:
        async with asyncio.TaskGroup() as group:
            asking = [
                group.create_task(ask(client, prompt, NUM_TOKENS, partial(bars.on_token, index)))
                for index, prompt in enumerate(prompts)
            ]
            group.create_task(show_devices(daemon, bars, asking))
    return [task.result() for task in asking]


async def show_devices(
    daemon: PrivateDaemon, bars: Bars, asking: Sequence[asyncio.Task[Answer]]
) -> None:
    while not all(task.done() for task in asking):
        bars.show_devices(await asyncio.to_thread(daemon_ps, daemon))
        await asyncio.sleep(LOOK_EVERY_S)


async def kill_one(console: Console, daemon: PrivateDaemon, bars: Bars) -> Kill:
    """Kill the worker with the most answers, in the middle of the answers; await a new worker."""
    while bars.num_tokens < KILL_AFTER_TOKENS:
        await asyncio.sleep(POLL_S)
    now = daemon_ps(daemon)
    device = max(now.devices, key=lambda row: row.num_requests)
    assert device.pid is not None
    os.kill(device.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    requests = [row for row in now.requests if row.device == device.device]
    console.print(
        f"   [bold red]kill -9 {device.pid}[/]  [dim](the worker of device {device.device} in "
        f"gpupool ps, with {len(requests)} of the answers)[/]"
    )
    new_pid = await new_worker(daemon, device.device, device.pid)
    back_s = time.monotonic() - killed_s
    console.print(
        f"   [dim]device {device.device} is back, with process {new_pid}, "
        f"after {format_duration(back_s)}[/]"
    )
    return Kill(device.device, device.pid, killed_s, requests, back_s)


async def new_worker(daemon: PrivateDaemon, number: int, killed_pid: int) -> int:
    """Wait for a device's new worker to be ready; return the process id.

    Raises:
        TimedOut: no new worker is ready within ``BACK_TIMEOUT_S``.
    """
    deadline_s = time.monotonic() + BACK_TIMEOUT_S
    while time.monotonic() < deadline_s:
        device = (await asyncio.to_thread(daemon_ps, daemon)).devices[number]
        if device.state == "ready" and device.pid not in (None, killed_pid):
            return device.pid
        await asyncio.sleep(POLL_S)
    raise TimedOut(f"device {number} had no new worker within {BACK_TIMEOUT_S:g} s")


def summarise(
    undisturbed: Sequence[Answer], disturbed: Sequence[Answer], kill: Kill
) -> dict[str, Any]:
    pairs = list(zip(undisturbed, disturbed, strict=True))
    hit = [pair for pair in pairs if kill.hit(pair[1])]
    spared = [pair for pair in pairs if not kill.hit(pair[1])]
    return {
        "requests": len(disturbed),
        "completed": sum(len(answer.token_ids) == NUM_TOKENS for answer in disturbed),
        "differing_tokens": sum(num_differing(*pair) for pair in pairs),
        "killed_device": kill.device,
        "worker_back_s": kill.back_s,
        "answers": {
            ON_KILLED: longest_pauses(hit, kill.at_s),
            ELSEWHERE: longest_pauses(spared, kill.at_s),
        },
        "hit": [answer.stream_id for _, answer in hit],
    }


def longest_pauses(pairs: Sequence[tuple[Answer, Answer]], killed_s: float) -> dict[str, Any]:
    """Return the longest times between two tokens of the answers.

    ``without_kill_s`` is of the undisturbed answers, ``from_kill_s`` of pauses that end after the
    kill. Tokens under way arrive after it, so no single pause is the kill's.
    """
    gaps = [pair for _, answer in pairs for pair in itertools.pairwise(answer.token_times_s)]
    from_kill = (end - begin for begin, end in gaps if end > killed_s)
    return {
        "requests": len(pairs),
        "without_kill_s": max((max(one.gaps_s) for one, _ in pairs), default=0.0),
        "from_kill_s": max(from_kill, default=0.0),
    }


def report(console: Console, result: dict[str, Any]) -> bool:
    """Print the result; return whether the kill hit answers, and all are complete and correct."""
    console.print(pauses_table(result["answers"]))
    if not result["hit"]:
        console.print("[red]No answer was in progress on the killed process: nothing is shown.[/]")
        return False
    if result["answers"][ELSEWHERE]["requests"]:
        console.print(
            "[dim]Until the new process is there all answers share the other GPU, so the answers "
            "there wait longer too.[/]"
        )
    differing, completed = result["differing_tokens"], result["completed"]
    is_good = bool(differing == 0 and completed == result["requests"])
    style = "green" if is_good else "red"
    console.print(
        f"[{style}]{completed} of {result['requests']} answers complete; {differing} tokens "
        "differ from the expected answers.[/]\n"
        f"The killed process was replaced after {format_duration(result['worker_back_s'])}.\n"
    )
    return is_good


def pauses_table(answers: dict[str, dict[str, Any]]) -> Table:
    table = new_table("longest pause between two tokens of an answer, as its client saw it")
    table.add_column("process of the answer", no_wrap=True)
    for title in ("answers", "without a kill", "from the kill on"):
        table.add_column(title, justify="right", no_wrap=True)
    for where, row in answers.items():
        if row["requests"]:
            times = (row["without_kill_s"], row["from_kill_s"])
            table.add_row(where, str(row["requests"]), *map(format_duration, times))
    return table
