"""The parts of an engine and of the residency that profiling needs."""

from __future__ import annotations

from typing import Protocol

from gpupoold.memory.pages import PagePool
from gpupoold.wire.messages import LoadedModel, RequestProgress
from gpupoold.worker.kv.page_eviction import PooledModel


class ProfiledModel(PooledModel, Protocol):
    """The part of a model's engine that profiling needs."""

    info: LoadedModel

    @property
    def max_batched_tokens(self) -> int:
        """Largest number of tokens in a step."""

    @property
    def max_sequences(self) -> int:
        """Largest number of requests in a step."""

    @property
    def max_tokens_each(self) -> int:
        """Largest number of tokens that an answer gains in a step."""

    def add_synthetic(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        """Queue a request with synthetic tokens and no client."""

    def abort(self, request_ids: list[str]) -> None:
        """End requests."""

    def has_requests(self) -> bool:
        """Return whether a step would do work."""

    def step(self, chunk_tokens: int | None = None) -> list[RequestProgress]:
        """Run one engine step of at most ``chunk_tokens``; return the requests' progress."""

    def begin_step(self) -> list[RequestProgress]:
        """Begin a step; return the progress of the step before, or without overlap of this step."""

    def end_steps(self) -> list[RequestProgress]:
        """Wait for the steps begun; return their progress since the last call."""


class Pages(Protocol):
    """The part of ``Residency`` that profiling needs."""

    pool: PagePool

    def make_resident(self, name: str) -> None:
        """Make a model resident with all its weights."""

    def ensure_kv(self, name: str) -> None:
        """Map the blocks that the next step needs."""
