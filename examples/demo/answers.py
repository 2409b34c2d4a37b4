"""Prompts, and the answers that a client receives."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from openai import AsyncOpenAI

from benchmarks.private_daemon import PrivateDaemon
from examples.demo.setting import TARGETS
from gpupoold.api.request_ids import is_request
from gpupoold.api.schemas import RequestInfo

QUESTIONS = (
    "What is the capital of a country that starts with the letter {letter}?",
    "Write a short poem about the number {number}.",
    "Explain to a child why {number} is larger than {letter}.",
    "List {number} things that begin with {letter}.",
)


@dataclass(slots=True)
class Answer:
    """A streamed answer; ``stream_id`` is the id of the chunks, empty before the first chunk."""

    model: str
    prompt: str
    asked_s: float = 0.0
    stream_id: str = ""
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

    def is_of(self, request: RequestInfo) -> bool:
        """Return whether this is the answer to a request in ``gpupool ps``."""
        return is_request(request.request_id, self.stream_id)


OnToken = Callable[[Answer], None]


def make_prompts(models: Sequence[str], num_prompts: int) -> list[Answer]:
    return [
        Answer(
            models[index % len(models)],
            QUESTIONS[index % len(QUESTIONS)].format(
                number=index + 2, letter="abcdefghijklmnopqrstuvwxyz"[index % 26]
            ),
        )
        for index in range(num_prompts)
    ]


def open_api(daemon: PrivateDaemon) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{daemon.http_url}/v1", api_key="none", max_retries=0)


async def ask(client: AsyncOpenAI, prompt: Answer, num_tokens: int, on_token: OnToken) -> Answer:
    """Send the prompt and return a new answer; ``on_token`` is called for each token."""
    answer = Answer(prompt.model, prompt.prompt, time.monotonic())
    stream = await client.chat.completions.create(
        model=prompt.model,
        messages=[{"role": "user", "content": prompt.prompt}],
        max_completion_tokens=num_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for chunk in stream:
        answer.stream_id = chunk.id
        for choice in chunk.choices:
            token_ids = (choice.model_extra or {}).get("token_ids") or []
            answer.token_ids.extend(token_ids)
            answer.token_times_s.extend([time.monotonic()] * len(token_ids))
            for _ in token_ids:
                on_token(answer)
    return answer


def num_differing(one: Answer, other: Answer) -> int:
    """Return the number of tokens that differ, or are missing in one of two answers."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    missing = abs(len(one.token_ids) - len(other.token_ids))
    return sum(mine != yours for mine, yours in pairs) + missing
