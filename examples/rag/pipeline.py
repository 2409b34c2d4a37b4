"""Answers from passages: embed, search, rerank, answer, review. Any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from openai import AsyncOpenAI

NUM_FOUND = 8
NUM_KEPT = 3
_TIMEOUT_S = 300.0
_ANSWER = "Answer from these passages only.\n\n{passages}\n\nQuestion: {question}"
_REVIEW = "Question: {question}\nAnswer: {answer}\nIs the answer supported by the passages?"


@dataclass(frozen=True, slots=True)
class RagModels:
    """The names of the models: one embeds, one ranks, one answers and one reviews."""

    embedder: str
    reranker: str
    writer: str
    reviewer: str

    @property
    def names(self) -> tuple[str, str, str, str]:
        return self.embedder, self.reranker, self.writer, self.reviewer


@dataclass(frozen=True, slots=True)
class Sourced:
    """An answer, its review, and the numbers of the passages, the best first."""

    question: str
    passages: tuple[int, ...]
    answer: str
    review: str


class Rag:
    """Passages with their embeddings, to be asked.

    ``url`` is the server's address without a path. ``num_tokens`` is the length of an answer.
    """

    def __init__(
        self, url: str, models: RagModels, passages: Sequence[str], num_tokens: int = 48
    ) -> None:
        self._models = models
        self._passages = list(passages)
        self._num_tokens = num_tokens
        self._openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=_TIMEOUT_S)
        self._http = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S)
        self._vectors: list[list[float]] = []

    async def close(self) -> None:
        await self._openai.close()
        await self._http.aclose()

    async def index(self) -> None:
        """Embed all passages with one request."""
        self._vectors = await self._embed(self._passages)

    async def ask(self, question: str) -> Sourced:
        """Answer a question from the passages."""
        [vector] = await self._embed([question])
        found = nearest(vector, self._vectors, NUM_FOUND)
        kept = await self._rerank(question, found)
        passages = "\n\n".join(self._passages[number] for number in kept)
        answer = await self._chat(
            self._models.writer, _ANSWER.format(passages=passages, question=question)
        )
        review = await self._chat(
            self._models.reviewer, _REVIEW.format(question=question, answer=answer)
        )
        return Sourced(question, tuple(kept), answer, review)

    async def ask_all(self, questions: Sequence[str]) -> list[Sourced]:
        """Answer questions at once."""
        return list(await asyncio.gather(*map(self.ask, questions)))

    async def _embed(self, texts: Sequence[str]) -> list[list[float]]:
        made = await self._openai.embeddings.create(model=self._models.embedder, input=list(texts))
        return [one.embedding for one in made.data]

    async def _rerank(self, question: str, found: Sequence[int]) -> list[int]:
        body = {
            "model": self._models.reranker,
            "query": question,
            "documents": [self._passages[number] for number in found],
            "top_n": NUM_KEPT,
        }
        answer = await self._http.post("/v1/rerank", json=body)
        answer.raise_for_status()
        return [found[row["index"]] for row in answer.json()["results"]]

    async def _chat(self, model: str, text: str) -> str:
        answer = await self._openai.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": text}],
            max_tokens=self._num_tokens,
            temperature=0,
        )
        return answer.choices[0].message.content or ""


def nearest(vector: Sequence[float], vectors: Sequence[Sequence[float]], count: int) -> list[int]:
    """Return the numbers of the nearest normalised vectors, the nearest first."""
    cosines = [sum(a * b for a, b in zip(vector, one, strict=True)) for one in vectors]
    return sorted(range(len(vectors)), key=lambda number: -cosines[number])[:count]
