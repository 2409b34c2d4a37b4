"""A small load generator: concurrent streamed completions, timed token by token."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from gpupoold.errors import Failed

_TIMEOUT_S = 600.0


@dataclass(slots=True)
class TimedAnswer:
    """An answer: the time of the request and of each chunk."""

    asked_s: float
    chunk_times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to the first chunk."""
        return self.chunk_times_s[0] - self.asked_s


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The measurements of a load run."""

    num_tokens: int
    seconds: float
    ttft_p50_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all streams per second."""
        return self.num_tokens / self.seconds


def combined(results: Sequence[LoadResult]) -> LoadResult:
    """The result of clients that ran at the same time."""
    return LoadResult(
        sum(result.num_tokens for result in results),
        max(result.seconds for result in results),
        statistics.median(result.ttft_p50_s for result in results),
    )


def run_load(
    url: str, model: str, prompts: Sequence[str], max_tokens: int, num_streams: int
) -> LoadResult:
    """Stream all prompts, ``num_streams`` at a time.

    Raises:
        Failed: the server answered with an error.
    """
    started_s = time.perf_counter()
    answers = asyncio.run(_run(url, model, prompts, max_tokens, num_streams))
    seconds = time.perf_counter() - started_s
    return LoadResult(
        sum(answer.num_tokens for answer in answers),
        seconds,
        statistics.median(answer.ttft_s for answer in answers),
    )


async def _run(
    url: str, model: str, prompts: Sequence[str], max_tokens: int, num_streams: int
) -> list[TimedAnswer]:
    free = asyncio.Semaphore(num_streams)
    limits = httpx.Limits(max_connections=num_streams, max_keepalive_connections=num_streams)
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits, trust_env=False) as client:

        async def one(prompt: str) -> TimedAnswer:
            async with free:
                return await _ask(client, url, model, prompt, max_tokens)

        return await asyncio.gather(*(one(prompt) for prompt in prompts))


async def _ask(
    client: httpx.AsyncClient, url: str, model: str, prompt: str, max_tokens: int
) -> TimedAnswer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = TimedAnswer(time.perf_counter())
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.is_error:
            raise Failed(f"{url}: HTTP {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise Failed(f"{url}: {chunk['error']}")
            if chunk["choices"]:
                answer.chunk_times_s.append(time.perf_counter())
            elif chunk.get("usage"):
                answer.num_tokens = chunk["usage"]["completion_tokens"]
    return answer
