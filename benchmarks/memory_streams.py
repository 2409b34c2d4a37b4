"""Thousands of switches under streams: four models with live KV, on a device for 1.5 models.

Every answer is compared, token for token, with the undisturbed answer to the same prompt.
Afterwards the device is emptied, and pages or host memory still in use are counted as leaks.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from openai import AsyncOpenAI

from benchmarks.bench.in_daemon import leftovers
from benchmarks.bench.rig import device_config, make_checkpoints, weight_bytes
from benchmarks.load import token_ids_of
from benchmarks.private_daemon import PrivateDaemon, private_daemon
from gpupoold.domain import Switch

ARCHITECTURES = ("llama", "mixtral", "qwen2", "qwen3")
MODEL_BYTES = 10_000_000
MAX_MODEL_LEN = 512
MAX_TOKENS = 96
NUM_PROMPTS = 4
# Rounds of all prompts before memory is measured, for buffers and heaps to reach their sizes.
WARM_UP_ROUNDS = 3
_CONFIG = """
[memory]
kv_host = "64MiB"

[scheduling]
quota_max = "30ms"
"""
_HISTORY_ROWS = 10_000
# Python's allocator takes memory from the kernel in arenas of this size.
_ARENA_BYTES = 1 << 20
HOST_MEMORY = ("kv_host_bytes", "shmem_bytes", "anon_bytes")

Key = tuple[str, int]


@dataclass(slots=True)
class Answers:
    """Token ids by model and prompt: alone, and every time among others."""

    alone: dict[Key, list[int]] = field(default_factory=dict)
    together: list[tuple[Key, list[int]]] = field(default_factory=list)

    @property
    def num_differing(self) -> int:
        """Tokens that are others than alone, or missing, or too many."""
        return sum(num_differing(self.alone[key], tokens) for key, tokens in self.together)


def run_streams(folder: Path, num_switches: int) -> dict[str, Any]:
    """``stream_over`` four new models.

    Raises:
        GpupoolError: the models could not be made or served.
    """
    return stream_over(make_checkpoints(folder, list(ARCHITECTURES), MODEL_BYTES), num_switches)


def stream_over(
    checkpoints: Sequence[Path], num_switches: int, num_warm_up: int = WARM_UP_ROUNDS
) -> dict[str, Any]:
    """Stream until at least ``num_switches`` switches have moved bytes, after a warm-up.

    Raises:
        GpupoolError: the models could not be served.
    """
    largest = max(weight_bytes(path) for path in checkpoints)
    config = device_config(int(1.5 * largest)) + _CONFIG
    with private_daemon(config) as daemon:
        for path in checkpoints:
            daemon.add_model(path.name, path, dtype="float32", max_model_len=MAX_MODEL_LEN)
        keys = [(path.name, index) for path in checkpoints for index in range(NUM_PROMPTS)]
        return asyncio.run(stream_keys(daemon, keys, num_switches, num_warm_up))


def num_differing(alone: list[int], together: list[int]) -> int:
    """Positions at which two answers differ; what one has more counts too."""
    pairs = zip(alone, together, strict=False)
    return sum(one != other for one, other in pairs) + abs(len(alone) - len(together))


def summary(
    answers: Answers,
    switches: Iterable[Switch],
    leftovers: Sequence[Mapping[str, int]],
    seconds: float,
) -> dict[str, Any]:
    """The figures of a run. ``leftovers`` is what an emptied device still held after each round.

    Host memory is the KV host cache's bytes in use, and the memory of the worker's process
    as the kernel counts it: private, and shared (pages, snapshots) without the KV host cache, a
    buffer of fixed size whose memory is taken as slots are first used. A heap grows and
    shrinks by a megabyte all the time, so what was gained is the difference of two medians:
    of the last third of the rounds and of the first. One arena, which an allocator takes once
    in a while, is not a leak; a second would be.
    """
    moved = [switch for switch in switches if switch.moved_bytes]
    gained = {
        name: (heap_gained if name == "anon_bytes" else _gained)([one[name] for one in leftovers])
        for name in HOST_MEMORY
    }
    last = leftovers[-1]
    return {
        "switches": len(moved),
        "switches_with_kv": sum(bool(s.kv_in_bytes or s.kv_out_bytes) for s in moved),
        "bytes_moved": sum(switch.moved_bytes for switch in moved),
        "rounds": len(leftovers),
        "answers": len(answers.together),
        "tokens": sum(len(tokens) for _, tokens in answers.together),
        "differing_tokens": answers.num_differing,
        "pages_leaked": last["pages"] - last["free_pages"],
        "host_bytes_gained": sum(gained.values()),
        "host_bytes_gained_by_kind": gained,
        "device_bytes_gained": _device_bytes_gained(leftovers),
        "host_bytes": [{name: one[name] for name in HOST_MEMORY} for one in leftovers],
        "seconds": seconds,
    }


def _device_bytes_gained(leftovers: Sequence[Mapping[str, Any]]) -> int | None:
    """Memory beside the pages that was free after the first rounds and is not after the last;
    None on a device that has no such memory."""
    free = [one.get("device_free_bytes") for one in leftovers]
    known = [-num_bytes for num_bytes in free if num_bytes is not None]
    return _gained(known) if known else None


def heap_gained(values: Sequence[int]) -> int:
    """Return what was gained, less the largest rise that may be an arena; never less than nothing
    by that, so that no other gain is hidden in a sum."""
    gained = _gained(values)
    rises = [after - before for before, after in itertools.pairwise(values)]
    arena = max((rise for rise in rises if 0 < rise <= _ARENA_BYTES), default=0)
    return gained - min(arena, max(0, gained))


def _gained(values: Sequence[int]) -> int:
    third = max(1, len(values) // 3)
    return int(median(values[-third:]) - median(values[:third]))


async def stream_keys(
    daemon: PrivateDaemon,
    keys: Sequence[Key],
    num_switches: int,
    num_warm_up: int = WARM_UP_ROUNDS,
    ends_s: float = math.inf,
) -> dict[str, Any]:
    """Stream these prompts of these models, over and over, until there are enough switches.

    Before each round the device is emptied, so that no answer begins with a cached prefix. No
    round begins after ``ends_s`` on ``time.monotonic``, but for the first.
    """
    answers = Answers()
    async with AsyncOpenAI(
        base_url=f"{daemon.http_url}/v1", api_key="none", max_retries=0
    ) as client:
        for key in keys:
            answers.alone[key] = await _ask(client, *key)
            _leftovers(daemon)
        for _ in range(num_warm_up):
            await _round(client, keys, answers)
            _leftovers(daemon)
        num_before = len(_switches(daemon))
        started_s = time.monotonic()
        switches: list[Switch] = []
        leftovers: list[dict[str, int]] = []
        while not leftovers or (
            _num_migrated(switches) < num_switches and time.monotonic() < ends_s
        ):
            await _round(client, keys, answers)
            leftovers.append(_leftovers(daemon))
            switches = _switches(daemon)[: -num_before or None]
        seconds = time.monotonic() - started_s
    return summary(answers, switches, leftovers, seconds)


def _num_migrated(switches: Iterable[Switch]) -> int:
    return sum(bool(switch.moved_bytes) for switch in switches)


async def _round(client: AsyncOpenAI, keys: Sequence[Key], answers: Answers) -> None:
    """All prompts of all models at once."""
    tokens = await asyncio.gather(*(_ask(client, *key) for key in keys))
    answers.together.extend(zip(keys, tokens, strict=True))


async def _ask(client: AsyncOpenAI, model: str, index: int) -> list[int]:
    """The token ids of one greedy stream."""
    pieces = token_ids_of(client, model, _prompt(index), MAX_TOKENS)
    return [token_id async for piece in pieces for token_id in piece]


def _prompt(index: int) -> list[int]:
    """Token ids that reach over several KV blocks."""
    rng = random.Random(index)
    return [rng.randrange(300, 1900) for _ in range(20 + 35 * index)]


def _switches(daemon: PrivateDaemon) -> list[Switch]:
    """All switches so far, the last one first."""
    with daemon.client() as client:
        return client.switches(_HISTORY_ROWS)


def _leftovers(daemon: PrivateDaemon) -> dict[str, int]:
    with daemon.client() as client:
        return leftovers(client)
