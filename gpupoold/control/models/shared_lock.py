"""A lock that many may share, or one have alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class SharedLock:
    """For tasks of one event loop. Who wants it alone goes before those who come later to share."""

    def __init__(self) -> None:
        self._gate = asyncio.Lock()  # held by who has it alone, or waits for that
        self._num_sharing = 0
        self._is_unshared = asyncio.Event()
        self._is_unshared.set()

    @contextlib.asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Inside, nobody has it alone."""
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
        """Inside, nobody else has it."""
        async with self._gate:
            await self._is_unshared.wait()
            yield
