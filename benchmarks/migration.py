"""Delay of the second token by a migration, compared with the same request on one device."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

from openai import AsyncOpenAI

from benchmarks.bench.rig import emulated_config, weight_bytes
from benchmarks.load import Ask, ask, client_of, prompt_token_ids
from benchmarks.private_daemon import PrivateDaemon, private_daemon

NUM_PROMPT_TOKENS = 1000
NUM_TOKENS = 8
MAX_MODEL_LEN = 1200
_PAUSE_S = 0.02

Role = Literal["prefill", "decode", "mixed"]


def run_migrate(checkpoint: Path, rounds: int) -> dict[str, Any]:
    """Second tokens of new prompts one after the other, in turns with and without a hand-over.

    Raises:
        GpupoolError: the model could not be served.
    """
    with private_daemon(emulated_config(8 * weight_bytes(checkpoint), 2)) as daemon:
        name = checkpoint.name
        info = daemon.add_model(name, checkpoint, dtype="float32", max_model_len=MAX_MODEL_LEN)
        with daemon.client() as client:
            device = client.ps().devices[0]
        kv_bytes = NUM_PROMPT_TOKENS * info.kv_bytes_per_token
        copy_s = kv_bytes / device.link_out_bytes_per_s + kv_bytes / device.link_in_bytes_per_s
        return asyncio.run(_measure(daemon, name, rounds, kv_bytes, copy_s))


async def _measure(
    daemon: PrivateDaemon, model: str, rounds: int, kv_bytes: int, copy_s: float
) -> dict[str, Any]:
    gaps_s: dict[str, list[float]] = {"stays": [], "moves": []}
    prompts = itertools.count(1)
    async with client_of(daemon.http_url) as client:
        for _ in range(2):  # the first steps of an engine are slow
            await _second_token_s(client, model, next(prompts))
        # Alternately, so that a slower machine slows both kinds of requests.
        ways: tuple[tuple[str, tuple[Role, Role]], ...] = (
            ("stays", ("mixed", "mixed")),
            ("moves", ("prefill", "decode")),
        )
        for _ in range(rounds):
            for kind, roles in ways:
                _set_roles(daemon, roles)
                await asyncio.sleep(_PAUSE_S)
                gaps_s[kind].append(await _second_token_s(client, model, next(prompts)))
    p50_s = {kind: median(values) for kind, values in gaps_s.items()}
    return {
        "rounds": rounds,
        "kv_bytes": kv_bytes,
        "copy_s": copy_s,
        "second_token_p50_s": p50_s,
        "added_p50_s": p50_s["moves"] - p50_s["stays"],
        "added_beyond_copy_p50_s": p50_s["moves"] - p50_s["stays"] - copy_s,
        "second_token_s": gaps_s,
    }


async def _second_token_s(client: AsyncOpenAI, model: str, number: int) -> float:
    """From the first token of a new prompt to the second."""
    prompt = prompt_token_ids(number, NUM_PROMPT_TOKENS)
    stream = await ask(client, Ask(model, number, NUM_TOKENS), prompt)
    if not stream.is_complete:
        raise RuntimeError(f"an answer did not come: {stream.problem}")
    return stream.times_s[1] - stream.times_s[0]


def _set_roles(daemon: PrivateDaemon, roles: Sequence[Role]) -> None:
    with daemon.client() as client:
        for number, role in enumerate(roles):
            client.set_role(number, role)
