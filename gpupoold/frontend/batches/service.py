"""Files and batches of a frontend: the routes, and in one frontend the runner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from gpupool_state.batches import BatchRow, BatchStatus, BatchStore
from gpupoold.config.sections import BatchSettings
from gpupoold.errors import GpupoolError
from gpupoold.frontend.batches.api import BatchApi
from gpupoold.frontend.batches.stored_files import StoredFiles
from gpupoold.frontend.batches.work import Ask, BatchWorker, TellWait
from gpupoold.frontend.callers import Caller, Callers
from gpupoold.frontend.errors import ApiError, starting
from gpupoold.frontend.places import Places
from gpupoold.frontend.request_context import BytesInFlight

_logger = logging.getLogger(__name__)
_RETRY_S = 5.0

_POLL_S = 0.5
_CLEAN_S = 600.0


class BatchService:
    """Files and batches in ``folder``; the database is opened by :meth:`run`.

    ``runs_batches`` is true in one frontend.
    """

    def __init__(
        self,
        folder: Path,
        bounds: BatchSettings,
        in_flight: BytesInFlight,
        callers: Callers,
        *,
        runs_batches: bool,
    ) -> None:
        self._folder = folder
        self._bounds = bounds
        self._in_flight = in_flight
        self._callers = callers
        self._runs_batches = runs_batches
        self._files = StoredFiles(folder / "files")
        self._api: BatchApi | None = None

    async def run(self, ask: Ask, tell_wait: TellWait) -> None:
        """Serve until cancelled; ``ask`` answers a request of a batch.

        ``tell_wait`` is told about a batch whose requests begin to wait, and why.
        """
        store = await self._open()
        self._api = BatchApi(store, self._files, self._bounds, self._in_flight)
        try:
            if not self._runs_batches:
                await asyncio.Event().wait()
            await self._callers.known.wait()
            places, find = Places(self._bounds.max_live), self._callers.of_batch
            work = BatchWorker(store, self._files, ask, find, places, self._bounds, tell_wait)
            await BatchRunner(store, self._files, work, self._bounds.keep_s).run()
        finally:
            self._api = None
            with contextlib.suppress(GpupoolError):
                if self._runs_batches:
                    await store.forget_asked()
            await store.close()

    async def serve(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to a path of files or batches.

        Raises:
            ApiError: the request is wrong, there is no room, or the disk fails.
        """
        if self._api is None:
            raise starting()
        try:
            await self._api.serve(caller, scope, receive, send)
        except (GpupoolError, OSError) as error:
            _logger.warning("%s %s: %s", scope["method"], scope["path"], error)
            text = "Files and batches cannot be read or written now; the daemon's log says why."
            raise ApiError(503, text, retry_after_s=_RETRY_S) from error

    async def _open(self) -> BatchStore:
        while True:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                return await BatchStore.open(self._folder)
            except (GpupoolError, OSError) as error:
                _logger.warning("files and batches are not served yet: %s", error)
                await asyncio.sleep(_RETRY_S)


class _Running(NamedTuple):
    """The work on a batch; ``end`` is the reason to end the batch at the start of the work."""

    task: asyncio.Task[None]
    end: BatchStatus | None


class BatchRunner:
    """Follows the database, so that any frontend may add or cancel batches.

    Files and ended batches are removed after ``keep_s`` seconds.
    """

    def __init__(
        self, store: BatchStore, files: StoredFiles, work: BatchWorker, keep_s: float
    ) -> None:
        self._store = store
        self._files = files
        self._work = work
        self._keep_s = keep_s
        self._running: dict[str, _Running] = {}
        self._cleaned_s = -_CLEAN_S

    async def run(self) -> None:
        """Run batches until cancelled; the batches then stop where they are."""
        with contextlib.suppress(GpupoolError, OSError):
            await self._work.recall()
        try:
            while True:
                with contextlib.suppress(GpupoolError, OSError):
                    await self._look()
                await asyncio.sleep(_POLL_S)
        finally:
            tasks = [one.task for one in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        """Start work on batches, and stop the work on batches that have to end."""
        for row in await self._store.under_way():
            running, end = self._running.get(row.id), self._work.why_stop(row)
            if running is not None and not running.task.done():
                if running.end is None and end is not None:
                    running.task.cancel()
                await self._work.note_if_still(row)
                continue
            task = asyncio.create_task(self._bring_on(row), name=row.id)
            self._running[row.id] = _Running(task, end)
        for batch_id in [one for one, work in self._running.items() if work.task.done()]:
            del self._running[batch_id]
        if time.monotonic() - self._cleaned_s >= _CLEAN_S:
            self._cleaned_s = time.monotonic()
            await self._clean()

    async def _bring_on(self, row: BatchRow) -> None:
        try:
            await self._work.bring_on(row)
        except (GpupoolError, OSError) as error:
            _logger.warning("batch %s goes on in a moment: %s", row.id, error)
        except Exception:
            _logger.exception("batch %s goes on in a moment", row.id)

    async def _clean(self) -> None:
        """Remove files and batches that are too old, and remains of crashes."""
        before = time.time() - self._keep_s
        for row in await self._store.old_files(before):
            await self._store.remove_file(row.id)
            await asyncio.to_thread(self._files.remove, row.id)
        await self._store.remove_old(before)
        known = await self._store.file_ids()
        await asyncio.to_thread(self._files.remove_unknown, known)
