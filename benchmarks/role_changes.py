"""Hundreds of role changes and drains under load: no request is lost, no page leaks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.faults import (
    NUM_DEVICES,
    alone_answers,
    pages_leaked,
    settle,
    several_devices,
    summary,
)
from benchmarks.load import Ask, Stream, ask, client_of
from benchmarks.private_daemon import PrivateDaemon

NUM_PROMPTS = 4
NUM_AT_ONCE = 12
NUM_TOKENS = 200
ROLES: tuple[Literal["prefill", "decode", "mixed"], ...] = ("prefill", "decode", "mixed")
_PAUSE_S = 0.05


def run_role_changes(checkpoints: Sequence[Path], num_changes: int) -> dict[str, Any]:
    """Half of the changes are roles, half are drains, while clients stream all the time.

    Raises:
        GpupoolError: the models could not be served.
    """
    with several_devices(checkpoints) as daemon:
        names = [path.name for path in checkpoints]
        return asyncio.run(_run(daemon, names, num_changes))


async def _run(daemon: PrivateDaemon, models: list[str], num_changes: int) -> dict[str, Any]:
    kinds = [Ask(m, p, NUM_TOKENS) for p in range(NUM_PROMPTS) for m in models]
    streams: list[Stream] = []
    async with client_of(daemon.http_url) as client:
        alone = await alone_answers(client, kinds)
        queue = itertools.cycle(kinds)
        stop = asyncio.Event()

        async def stream_on() -> None:
            while not stop.is_set():
                streams.append(await ask(client, next(queue)))

        started_s = time.monotonic()
        readers = [asyncio.create_task(stream_on()) for _ in range(NUM_AT_ONCE)]
        try:
            await asyncio.to_thread(_change, daemon, num_changes)
        finally:
            stop.set()
            await asyncio.gather(*readers)
        seconds = time.monotonic() - started_s
    await asyncio.to_thread(settle, daemon)
    return summary(streams, alone) | {
        "role_changes": num_changes,
        "seconds": seconds,
        "pages_leaked": pages_leaked(daemon),
    }


def _change(daemon: PrivateDaemon, num_changes: int) -> None:
    rng = random.Random(num_changes)
    with contextlib.closing(daemon.client()) as client:
        for index in range(num_changes):
            number = rng.randrange(NUM_DEVICES)
            if index % 2:
                client.set_role(number, rng.choice(ROLES))
            else:
                client.drain(number)
                client.undrain(number)
            time.sleep(_PAUSE_S)
        for number in range(NUM_DEVICES):
            client.set_role(number, "mixed")
