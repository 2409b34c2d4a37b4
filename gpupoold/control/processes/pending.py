"""Awaited answers of another process, by key."""

from __future__ import annotations

import asyncio
import itertools
from typing import Generic, TypeVar

from gpupoold.errors import error_from_code
from gpupoold.wire.messages import CallResult

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

    async def answer(self, key: K, limit_s: float) -> V:
        """Return the answer to a request; to be called immediately after sending the request.

        Raises:
            TimeoutError: no answer came within ``limit_s`` seconds.
        """
        future = self.expect(key)
        try:
            async with asyncio.timeout(limit_s):
                return await future
        finally:
            self.forget(key)

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
        """Return when no caller waits for the answer."""
        future = self._futures.get(key)
        if future is not None:
            await asyncio.wait({future})

    def resolve(self, key: K, value: V) -> bool:
        """Pass an answer to the waiting caller; return False if no answer is awaited."""
        future = self._futures.get(key)
        if future is None or future.done():
            return False
        future.set_result(value)
        return True

    def reject(self, key: K, error: Exception) -> None:
        """Raise ``error`` in the waiting caller."""
        future = self._futures.get(key)
        if future is not None and not future.done():
            future.set_exception(error)

    def resolve_all(self, value: V) -> None:
        for key in self._futures:
            self.resolve(key, value)

    def reject_all(self, error: Exception) -> None:
        """Raise ``error`` in all waiting callers."""
        for key in self._futures:
            self.reject(key, error)


class Calls(Pending[int, V]):
    """Answers to numbered calls."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    def next_id(self) -> int:
        """Return the number of a new call."""
        return next(self._numbers)

    def answered(self, result: CallResult, value: V) -> None:
        """Resolve the call with ``value``, or reject the call with the error in ``result``."""
        if result.error_code:
            error = error_from_code(result.error_code, result.error_message, result.error_hint)
            self.reject(result.call_id, error)
        else:
            self.resolve(result.call_id, value)
