"""Awaited answers of another process, by key."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Pending(Generic[K, V]):
    """Futures by key, at most one per key; unexpected answers are ignored."""

    def __init__(self) -> None:
        self._futures: dict[K, asyncio.Future[V]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._futures

    def expect(self, key: K) -> asyncio.Future[V]:
        """Return the future for an answer about to be requested."""
        future: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        self._futures[key] = future
        return future

    @property
    def oldest(self) -> K | None:
        """The key with the longest wait, None if no answer is awaited."""
        return next(iter(self._futures), None)

    def forget(self, key: K) -> None:
        """Stop waiting for a key, including callers of :meth:`settled`."""
        future = self._futures.pop(key, None)
        if future is not None:
            future.cancel()

    async def settled(self, key: K) -> None:
        """Return when the answer has come or its waiter has given up; at once without a waiter."""
        future = self._futures.get(key)
        if future is not None:
            await asyncio.wait({future})

    def resolve(self, key: K, value: V) -> None:
        future = self._futures.get(key)
        if future is not None and not future.done():
            future.set_result(value)

    def reject(self, key: K, error: Exception) -> None:
        """No answer comes, and why."""
        future = self._futures.get(key)
        if future is not None and not future.done():
            future.set_exception(error)

    def resolve_all(self, value: V) -> None:
        for key in self._futures:
            self.resolve(key, value)

    def reject_all(self, error: Exception) -> None:
        """None of the answers comes, and why."""
        for key in self._futures:
            self.reject(key, error)
