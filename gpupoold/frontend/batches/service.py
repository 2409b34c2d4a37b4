"""Files and batches of a frontend: the routes, and in one frontend the runner."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from gpupool_state.batches import BatchStore
from gpupoold.errors import GpupoolError
from gpupoold.frontend.batches.api import BatchApi
from gpupoold.frontend.batches.limits import BatchBounds
from gpupoold.frontend.batches.runner import BatchRunner
from gpupoold.frontend.batches.stored_files import StoredFiles
from gpupoold.frontend.batches.work import Ask, BatchWorker, TellWait
from gpupoold.frontend.callers import Caller, Callers
from gpupoold.frontend.errors import ApiError, starting
from gpupoold.frontend.in_flight import BytesInFlight
from gpupoold.frontend.mounts import Receive, Scope, Send
from gpupoold.frontend.places import Places

_logger = logging.getLogger(__name__)
_RETRY_S = 5.0


class BatchService:
    """Files and batches; the database is opened by :meth:`run`."""

    def __init__(self, bounds: BatchBounds, in_flight: BytesInFlight, callers: Callers) -> None:
        self._bounds = bounds
        self._in_flight = in_flight
        self._callers = callers
        self._files = StoredFiles(bounds.folder / "files")
        self._api: BatchApi | None = None

    async def run(self, ask: Ask, tell_wait: TellWait) -> None:
        """Serve until cancelled; ``ask`` answers a request of a batch.

        ``tell_wait`` is told about a batch whose requests begin to wait, and why.
        """
        store = await self._open()
        self._api = BatchApi(store, self._files, self._bounds, self._in_flight)
        try:
            if not self._bounds.runs_batches:
                await asyncio.Event().wait()
            await self._callers.known.wait()
            places, find = Places(self._bounds.max_live), self._callers.of_batch
            work = BatchWorker(store, self._files, ask, find, places, self._bounds, tell_wait)
            await BatchRunner(store, self._files, work, self._bounds.keep_s).run()
        finally:
            self._api = None
            with contextlib.suppress(GpupoolError):
                if self._bounds.runs_batches:
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
            raise ApiError(503, "ServiceUnavailableError", text, retry_after_s=_RETRY_S) from error

    async def _open(self) -> BatchStore:
        """Open the database as soon as possible."""
        while True:
            try:
                self._bounds.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                return await BatchStore.open(self._bounds.folder)
            except (GpupoolError, OSError) as error:
                _logger.warning("files and batches are not served yet: %s", error)
                await asyncio.sleep(_RETRY_S)
