"""Greedy streams from a daemon, requested with the OpenAI client."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

import httpx
import openai
from openai import AsyncOpenAI

# Pause before a retry, and the longest time of retries, if the server is busy or unreachable.
_RETRY_PAUSE_S = 0.2
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: prompts of one number are the same."""

    model: str
    prompt: int
    num_tokens: int


@dataclass(slots=True)
class Stream:
    """What came of a request, and when its tokens came."""

    ask: Ask
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    num_retries: int = 0
    problem: str = ""

    @property
    def is_complete(self) -> bool:
        """True if it ended as it should."""
        return not self.problem and len(self.token_ids) == self.ask.num_tokens

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two of its tokens."""
        gaps_s = (later - sooner for sooner, later in itertools.pairwise(self.times_s))
        return max(gaps_s, default=0.0)


def client_of(http_url: str) -> AsyncOpenAI:
    """The official client, whose retries are ours to count."""
    return AsyncOpenAI(base_url=f"{http_url}/v1", api_key="none", max_retries=0, timeout=300)


def prompt_token_ids(number: int, num_tokens: int | None = None) -> list[int]:
    """A prompt of its own for every number, of 20 to 300 tokens if it is not said how many."""
    rng = random.Random(number)
    return [rng.randrange(300, 1900) for _ in range(num_tokens or rng.randrange(20, 300))]


async def ask(client: AsyncOpenAI, wanted: Ask, prompt: list[int] | None = None) -> Stream:
    """Stream an answer; begin again, as clients do, where the connection or the daemon fails."""
    stream = Stream(wanted)
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        pause_s = _RETRY_PAUSE_S
        stream.token_ids, stream.times_s, stream.problem = [], [], ""
        try:
            await _read(client, stream, prompt or prompt_token_ids(wanted.prompt))
            return stream
        except (openai.APIConnectionError, httpx.HTTPError) as error:
            stream.problem = f"{type(error).__name__}: {error}"
        except openai.APIStatusError as error:
            stream.problem = f"{error.status_code}: {error}"
            if error.status_code not in (429, 503):
                return stream
            pause_s = float(error.response.headers.get("retry-after", pause_s))
        except openai.APIError as error:
            stream.problem = str(error)
            return stream
        if time.monotonic() > deadline_s:
            return stream
        stream.num_retries += 1
        await asyncio.sleep(pause_s)


async def ask_all(client: AsyncOpenAI, asks: Iterable[Ask], num_at_once: int) -> list[Stream]:
    """All of them in order, so many at a time."""
    gate = asyncio.Semaphore(num_at_once)

    async def one(wanted: Ask) -> Stream:
        async with gate:
            return await ask(client, wanted)

    return list(await asyncio.gather(*map(one, asks)))


async def token_ids_of(
    client: AsyncOpenAI, model: str, prompt: str | list[int], num_tokens: int
) -> AsyncIterator[list[int]]:
    """The token ids of a greedy answer of so many tokens, as its chunks come.

    Raises:
        openai.APIError: what the server says, or that the connection failed.
    """
    chunks = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=num_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for chunk in chunks:
        for choice in chunk.choices:
            yield (choice.model_extra or {}).get("token_ids") or []


async def _read(client: AsyncOpenAI, stream: Stream, prompt: list[int]) -> None:
    wanted = stream.ask
    async for token_ids in token_ids_of(client, wanted.model, prompt, wanted.num_tokens):
        stream.token_ids += token_ids
        stream.times_s += [time.monotonic()] * len(token_ids)
