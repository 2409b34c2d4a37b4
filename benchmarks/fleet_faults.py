"""Faults of a fleet under load: a parted agent, and nodes that die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.fleet_box import Fleet
from benchmarks.sim_devices import send_all
from gpupoold.sim.workloads import SimRequest
from gpupoold.stats.histogram import percentile

STREAM_TOKENS = 600
PARTED_S = 60.0
_SETTLED_S = 120.0
_LEAD_S = 20.0  # of load before a kill
_WINDOW_S = 5.0
_GOOD = 0.99
_DISCARDED_S = 3.0


async def partition(
    fleet: Fleet, node: str, requests: Sequence[SimRequest], wanted: Mapping[str, int]
) -> dict[str, Any]:
    """Part a node's agent from the fleet under load; wait until each model has its nodes again."""
    sending = asyncio.create_task(send_all(fleet.url, requests, 1, 0.2))
    with fleet.parted(node):
        await asyncio.sleep(PARTED_S)
        was_lost = await asyncio.to_thread(fleet.is_lost, node)
    settled_s = await asyncio.to_thread(fleet.settled_after_s, wanted, _SETTLED_S)
    sent = await sending
    return {
        "requests": len(requests),
        "errors": sent.errors.total(),
        "first_errors": dict(sent.errors.most_common(3)),
        "settled_after_s": _SETTLED_S if settled_s is None else settled_s,
        "is_settled": settled_s is not None,
        "was_lost": was_lost,
    }


async def death_under_load(
    fleet: Fleet, node: str, requests: Sequence[SimRequest], streamed: str, ttft_s: float
) -> dict[str, Any]:
    """Kill a node under load; follow the attainment at the other nodes, and first tokens as clients
    see them."""
    async with _counting(fleet, streamed) as samples:
        sending = asyncio.create_task(send_all(fleet.url, requests, 2, 1.0))
        await asyncio.sleep(_LEAD_S)
        killed_s = time.monotonic()
        await asyncio.to_thread(fleet.kill, node)
        sent = await sending
    windows = _windows(samples, killed_s)
    bad = [end_s for end_s, attainment in windows if attainment < _GOOD]
    firsts = zip(sent.asked_s, sent.ttfts_s, strict=True)
    late_s = [asked_s - killed_s for asked_s, one_s in firsts if one_s > ttft_s]
    return {
        "requests": len(requests),
        "errors": sent.errors.total(),
        "first_errors": dict(sent.errors.most_common(3)),
        "attainment_by_second": [[round(at_s, 1), round(one, 4)] for at_s, one in windows],
        "attainment_back_s": max(bad, default=0.0),
        "late_first_tokens": len(late_s),
        "largest_ttft_s": max(sent.ttfts_s),
        "first_tokens_back_s": max(late_s, default=0.0),
    }


@contextlib.asynccontextmanager
async def _counting(fleet: Fleet, without: str) -> AsyncIterator[list[tuple[float, int, int]]]:
    """Collect the time, the tokens and the tokens in time, every second."""
    samples: list[tuple[float, int, int]] = []

    async def count() -> None:
        while True:
            with contextlib.suppress(Exception):  # a node dies
                tokens, in_time = await asyncio.to_thread(fleet.counted, without=without)
                samples.append((time.monotonic(), tokens, in_time))
            await asyncio.sleep(1.0)

    counting = asyncio.create_task(count())
    try:
        yield samples
    finally:
        counting.cancel()


def _windows(
    samples: Sequence[tuple[float, int, int]], killed_s: float
) -> list[tuple[float, float]]:
    """Return the attainment of windows after the kill, by the seconds to the window's end."""
    after = [sample for sample in samples if sample[0] > killed_s + 1.0]
    found, begin = [], 0
    for end in range(1, len(after)):
        if after[end][0] - after[begin][0] >= _WINDOW_S:
            tokens = after[end][1] - after[begin][1]
            in_time = after[end][2] - after[begin][2]
            found.append((after[end][0] - killed_s, in_time / max(1, tokens)))
            begin = end
    return found


@dataclass(slots=True)
class Stream:
    """A stream as its client sees it: the times of its chunks and the tokens in the end."""

    node: str = ""
    chunks_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    is_whole: bool = False

    def resumed_after_s(self, at_s: float) -> float | None:
        """Return the seconds from a moment to the next chunk, None without one."""
        return next((one - at_s for one in self.chunks_s if one > at_s), None)


async def death_with_streams(fleet: Fleet, model: str, num_streams: int) -> dict[str, Any]:
    """Kill one of the nodes with open streams of a model."""
    doomed = next(one for one in fleet.serving(model) if one != fleet.head)
    streams = [Stream() for _ in range(num_streams)]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        reading = [
            asyncio.create_task(_read(session, fleet.url, model, number, one))
            for number, one in enumerate(streams)
        ]
        while not all(one.chunks_s for one in streams):
            await asyncio.sleep(0.1)
        await asyncio.sleep(_DISCARDED_S)
        killed_s = time.monotonic()
        await asyncio.to_thread(fleet.kill, doomed)
        await asyncio.gather(*reading, return_exceptions=True)
    of_dead = [one for one in streams if one.node == doomed]
    resumed_s = [one.resumed_after_s(killed_s + 0.2) or 600.0 for one in of_dead]
    lost = [one for one in streams if not one.is_whole or one.num_tokens != STREAM_TOKENS]
    return {
        "streams": num_streams,
        "of_dead_node": len(of_dead),
        "lost": len(lost),
        "resumed_p50_s": percentile(resumed_s, 0.5),
        "resumed_p99_s": percentile(resumed_s, 0.99) or 0.0,
    }


async def _read(
    session: aiohttp.ClientSession, url: str, model: str, number: int, stream: Stream
) -> None:
    # A conversation of its own, so that the streams are on both nodes.
    prompt = [300 + number] * 8
    body = {"model": model, "prompt": prompt, "max_tokens": STREAM_TOKENS, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        stream.node = answer.headers.get("x-gpupool-node", "")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                stream.chunks_s.append(time.monotonic())
                usage = json.loads(line[6:]).get("usage")
                if usage:
                    stream.num_tokens = usage["completion_tokens"]
            elif line.startswith(b"data: [DONE]"):
                stream.is_whole = True
