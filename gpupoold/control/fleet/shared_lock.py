"""A lock for many readers or one writer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class SharedLock:
    """A lock for tasks of one event loop; a waiting writer precedes later readers."""

    def __init__(self) -> None:
        self._gate = asyncio.Lock()  # held by the writer, also while the writer waits
        self._num_sharing = 0
        self._is_unshared = asyncio.Event()
        self._is_unshared.set()

    @property
    def is_free(self) -> bool:
        """True if no task holds or awaits the lock: ``alone`` would not wait."""
        return not self._gate.locked() and not self._num_sharing

    @property
    def has_writer(self) -> bool:
        """True if a task holds or awaits the lock alone: a reader would wait."""
        return self._gate.locked()

    @contextlib.asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Hold the lock with other readers."""
        async with self._gate:
            self._num_sharing += 1
            self._is_unshared.clear()
        try:
            yield
        finally:
            self._num_sharing -= 1
            if not self._num_sharing:
                self._is_unshared.set()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold the lock alone."""
        async with self._gate:
            await self._is_unshared.wait()
            yield
