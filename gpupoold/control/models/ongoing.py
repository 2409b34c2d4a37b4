"""Additions in progress: their latest step, and additions that go on without a reader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import cast

from gpupool_state import History
from gpupoold.api.schemas import AdditionInfo
from gpupoold.api.schemas_models import Progress
from gpupoold.errors import GpupoolError

_logger = logging.getLogger(__name__)


class OngoingAdditions:
    """The additions of models and adapters that have begun and not ended; by name."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._latest: dict[str, Progress] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def infos(self) -> list[AdditionInfo]:
        """Return the latest step of each addition."""
        fields = set(AdditionInfo.model_fields) - {"name"}
        return [
            AdditionInfo(name=name, **step.model_dump(include=fields))
            for name, step in self._latest.items()
        ]

    async def followed(
        self, name: str, steps: AsyncIterator[Progress]
    ) -> AsyncGenerator[Progress, None]:
        """Yield the steps of an addition, which ends when the reader leaves."""
        own: Progress | None = None
        try:
            async with aclosing(cast("AsyncGenerator[Progress, None]", steps)):
                async for step in steps:
                    own = self._latest[name] = step
                    yield step
        finally:
            # A second addition of the name is refused before its first step.
            if own is not None and self._latest.get(name) is own:
                del self._latest[name]

    async def detached(
        self, name: str, steps: AsyncIterator[Progress]
    ) -> AsyncGenerator[Progress, None]:
        """Yield the steps up to the end of the checks; the rest goes on without a reader.

        The last step has the stage ``detached``. A later failure is an event.
        """
        followed = self.followed(name, steps)
        was_checked = False
        async for step in followed:
            if was_checked and step.stage != "check":
                task = asyncio.create_task(self._finish(name, step.stage, followed))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                yield Progress(stage="detached")
                return
            was_checked = was_checked or step.stage == "check"
            yield step

    async def stop(self) -> None:
        """End the additions without a reader."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _finish(self, name: str, stage: str, steps: AsyncGenerator[Progress, None]) -> None:
        try:
            async with aclosing(steps):
                async for step in steps:
                    stage = step.stage
        except GpupoolError as error:
            _logger.warning("%s was not added: %s", name, error)
            if stage != "load":  # failed loads are recorded by the addition
                self._history.record_event("error", "model_refused", name, str(error))
