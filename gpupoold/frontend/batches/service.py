"""Files and batches of a frontend: the routes, and in one frontend the runner.

A batch's requests go to the frontend's own application as ASGI exchanges inside the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from gpupool_state.batches import BatchRow, BatchStatus, BatchStore
from gpupoold.config.sections import BatchSettings
from gpupoold.errors import GpupoolError
from gpupoold.frontend.batches.api import BatchApi
from gpupoold.frontend.batches.files import StoredFiles
from gpupoold.frontend.batches.places import Places
from gpupoold.frontend.batches.work import Ask, BatchWorker, JsonAnswer, TellWait
from gpupoold.frontend.callers import Caller, Callers
from gpupoold.frontend.errors import ApiError, starting
from gpupoold.frontend.request_context import BytesInFlight

_logger = logging.getLogger(__name__)
_RETRY_S = 5.0

_POLL_S = 0.5
_CLEAN_S = 600.0

_MAX_REASON_CHARS = 400
_LEAVING_S = 1.0


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

        Raises ApiError: the request is wrong, there is no room, or the disk fails.
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
            tasks = [running.task for running in self._running.values()]
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
        for batch_id in [key for key, work in self._running.items() if work.task.done()]:
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


class Exchange:
    """One POST of JSON, and its answer."""

    def __init__(self, path: str, body: bytes) -> None:
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"host", b"batch"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
            "client": None,
            "server": None,
            "state": {},
        }
        self._unread: bytes | None = body
        self._is_left = asyncio.Event()
        self._status = 500
        self._retry_after_s = 0.0
        self._pieces: list[bytes] = []

    async def run(self, answering: Coroutine[Any, Any, None]) -> None:
        """Await the application; a cancellation reaches the application as the client's end.

        vLLM's routes let the work go on when only their own task is cancelled.
        """
        task = asyncio.ensure_future(answering)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            self._is_left.set()
            await asyncio.wait([task], timeout=_LEAVING_S)
            task.cancel()
            raise

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the body once, then, when the exchange is left, the end of the connection."""
        if self._unread is None:
            await self._is_left.wait()
            return {"type": "http.disconnect"}
        body, self._unread = self._unread, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            found = dict(message.get("headers", ())).get(b"retry-after", b"")
            self._retry_after_s = float(found) if found.isdigit() else 0.0
        elif message["type"] == "http.response.body":
            self._pieces.append(message.get("body", b""))

    def answer(self, request_id: str) -> JsonAnswer:
        """Return the answer; 500 without one."""
        body = b"".join(self._pieces) or b"null"
        reason = _message_of(body) if self._status >= 400 else ""
        return JsonAnswer(self._status, request_id, body, self._retry_after_s, reason)


class _Refusal(msgspec.Struct):
    message: str


class _RefusalBody(msgspec.Struct):
    error: _Refusal


def _message_of(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_RefusalBody).error.message[:_MAX_REASON_CHARS]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
