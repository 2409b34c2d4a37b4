"""Requests over several models and workers, while workers and the frontend are killed.

Every answer must be complete and equal to the undisturbed answer: no token twice, none missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from openai import AsyncOpenAI

from benchmarks.bench.rig import emulated_config, weight_bytes
from benchmarks.load import Ask, Stream, ask_all, client_of
from benchmarks.private_daemon import PrivateDaemon, private_daemon
from benchmarks.processes import descendants, module_of
from gpupoold.api.client import AdminClient
from gpupoold.api.schemas import DeviceInfo, Ps
from gpupoold.errors import GpupoolError

NUM_DEVICES = 3
NUM_PROMPTS = 5
NUM_AT_ONCE = 24
NUM_TOKENS = 160
KILL_EVERY_S = 2.0
MAX_MODEL_LEN = 512
_SETTLE_S = 60.0
_POLL_S = 0.1


@dataclass(slots=True)
class Kills:
    """Who was killed."""

    workers: int = 0
    frontends: int = 0
    pids: set[int] = field(default_factory=set)


def run_faults(
    checkpoints: Sequence[Path], num_requests: int, kill_every_s: float = KILL_EVERY_S
) -> dict[str, Any]:
    """Serve ``num_requests`` while a worker is killed every so often, and a frontend once.

    Raises:
        GpupoolError: the models could not be served.
    """
    with several_devices(checkpoints) as daemon:
        names = [path.name for path in checkpoints]
        return asyncio.run(_serve(daemon, names, num_requests, kill_every_s))


@contextlib.contextmanager
def several_devices(checkpoints: Sequence[Path]) -> Iterator[PrivateDaemon]:
    """A daemon with these models, on devices that hold two and a half of the largest each."""
    largest = max(weight_bytes(path) for path in checkpoints)
    with private_daemon(emulated_config(int(2.5 * largest), NUM_DEVICES)) as daemon:
        for path in checkpoints:
            daemon.add_model(path.name, path, dtype="float32", max_model_len=MAX_MODEL_LEN)
        yield daemon


async def _serve(
    daemon: PrivateDaemon, models: list[str], num_requests: int, kill_every_s: float
) -> dict[str, Any]:
    kinds = [Ask(m, p, NUM_TOKENS) for p in range(NUM_PROMPTS) for m in models]
    kills = Kills()
    async with client_of(daemon.http_url) as client:
        alone = await alone_answers(client, kinds)
        asks = list(itertools.islice(itertools.cycle(kinds), num_requests))
        started_s = time.monotonic()
        async with _killing(daemon, kill_every_s, kills):
            streams = await ask_all(client, asks, NUM_AT_ONCE)
        seconds = time.monotonic() - started_s
    await asyncio.to_thread(settle, daemon, kills.pids)
    return summary(streams, alone) | {
        "kills": kills.workers,
        "frontend_kills": kills.frontends,
        "seconds": seconds,
        "workers": NUM_DEVICES,
        "models": len(models),
        "pages_leaked": pages_leaked(daemon),
    }


def summary(streams: Sequence[Stream], alone: dict[Ask, list[int]]) -> dict[str, Any]:
    """What came of all requests, and the pauses that their clients saw."""
    complete = [one for one in streams if one.is_complete]
    pauses_s = sorted(one.longest_gap_s for one in complete)
    return {
        "requests": len(streams),
        "completed": len(complete),
        "differing_texts": sum(one.token_ids != alone[one.ask] for one in complete),
        "tokens": sum(len(one.token_ids) for one in complete),
        "retried_by_client": sum(bool(one.num_retries) for one in streams),
        "problems": sorted({one.problem for one in streams if one.problem}),
        "longest_pause_p50_s": median(pauses_s) if pauses_s else None,
        "longest_pause_max_s": pauses_s[-1] if pauses_s else None,
    }


async def alone_answers(client: AsyncOpenAI, kinds: Sequence[Ask]) -> dict[Ask, list[int]]:
    """Every answer with nothing else going on."""
    streams = await ask_all(client, kinds, num_at_once=1)
    return {stream.ask: stream.token_ids for stream in streams}


def settle(daemon: PrivateDaemon, killed: Collection[int] = ()) -> None:
    """Return when all workers are up with all models and nothing is live.

    The daemon may not know yet that the last one of those ``killed`` (process ids) has gone.

    Raises:
        TimeoutError: it takes too long.
    """
    deadline_s = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline_s:
        with daemon.client() as client:
            now = client.ps()
        if _is_settled(now) and not any(row.pid in killed for row in now.devices):
            return
        time.sleep(_POLL_S)
    raise TimeoutError(f"the daemon was not idle and whole within {_SETTLE_S:g} s")


def pages_leaked(daemon: PrivateDaemon) -> int:
    """Pages that are neither free nor a model's, over all workers, whose accounts must agree.

    A load, of a model that is ready on another device, has pages too, but not for ever.
    """
    deadline_s = time.monotonic() + _SETTLE_S
    with daemon.client() as client:
        while True:
            accounts = client.check()
            found = sum(one["pages"] - one["free_pages"] - one["owned_pages"] for one in accounts)
            if not found or time.monotonic() > deadline_s:
                return found
            time.sleep(_POLL_S)


def _is_settled(now: Ps) -> bool:
    states = {row.state for row in now.devices} | {row.state for row in now.models}
    is_up = states == {"ready"}
    return is_up and not now.requests and not any(row.kv_host_bytes for row in now.devices)


@contextlib.asynccontextmanager
async def _killing(daemon: PrivateDaemon, every_s: float, kills: Kills) -> AsyncIterator[None]:
    """Inside this context one worker after the other is killed, and at first the frontend."""
    task = asyncio.create_task(_kill(daemon, every_s, kills))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _kill(daemon: PrivateDaemon, every_s: float, kills: Kills) -> None:
    for number in itertools.cycle(range(NUM_DEVICES)):
        await asyncio.sleep(every_s)
        with contextlib.suppress(GpupoolError), daemon.client() as client:
            row = await _alive(client, number)
            if row.pid is not None:
                os.kill(row.pid, signal.SIGKILL)
                kills.workers += 1
                kills.pids.add(row.pid)
        if not kills.frontends and kills.workers >= 2:
            kills.frontends += _kill_frontend(daemon)


async def _alive(client: AdminClient, number: int) -> DeviceInfo:
    """Return a device's state when its worker is up with all models: slow machines need time."""
    while True:
        now = await asyncio.to_thread(client.ps)
        row = now.devices[number]
        num_loaded = sum(any(one.device == number for one in m.engines) for m in now.models)
        if row.state == "ready" and num_loaded == len(now.models):
            return row
        await asyncio.sleep(_POLL_S)


def _kill_frontend(daemon: PrivateDaemon) -> int:
    for process in descendants(daemon):
        with contextlib.suppress(psutil.Error):
            if module_of(process) == "gpupoold.frontend":
                process.kill()
                return 1
    return 0
