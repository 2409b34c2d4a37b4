"""One batch: its input is checked, its requests are answered, its files are written.

Each request goes through the frontend's own application, as from a client with the batch's key, but
with background priority. A stored result is never computed again; a request whose result was not
stored is asked again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import islice
from typing import NamedTuple, TypeVar

from gpupool_state.batches import BatchRow, BatchStatus, BatchStore, FileRow, ResultRow
from gpupoold.frontend.batches.input_file import (
    MAX_ERRORS,
    BatchLine,
    LineProblem,
    check_lines,
    lines_of,
)
from gpupoold.frontend.batches.limits import BatchBounds
from gpupoold.frontend.batches.results import expired_line, result_line
from gpupoold.frontend.batches.stored_files import NewFile, StoredFiles
from gpupoold.frontend.callers import Caller

_logger = logging.getLogger(__name__)

T = TypeVar("T")
# Lines that are read, checked or written at once, in a thread.
_CHUNK = 200
# Statuses of answers that tell of the moment, not of the request.
_TRY_AGAIN = frozenset({429, 503})
_MAX_TRIES = 3
_RETRY_S = 1.0
_MAX_RETRY_S = 30.0
# Results of so many seconds may exceed a bound of space: looking sums all results up.
_ROOM_S = 5.0


class JsonAnswer(NamedTuple):
    """An HTTP answer with JSON."""

    status: int
    request_id: str
    body: bytes


Ask = Callable[[Caller, str, bytes], Awaitable[JsonAnswer]]
FindCaller = Callable[[str], Caller | None]


class BatchWorker:
    """Works on batches; ``ask`` answers one request, ``find_caller`` finds an owner by id.

    ``free`` bounds the requests of all batches that run at once.
    """

    def __init__(
        self,
        store: BatchStore,
        files: StoredFiles,
        ask: Ask,
        find_caller: FindCaller,
        free: asyncio.Semaphore,
        bounds: BatchBounds,
    ) -> None:
        self._store = store
        self._files = files
        self._ask = ask
        self._find_caller = find_caller
        self._free = free
        self._bounds = bounds

    def why_stop(self, row: BatchRow) -> BatchStatus | None:
        """Return the status in which a batch has to end now, None for a batch that may go on."""
        if row.status == "finalizing":
            return None
        if row.status == "cancelling" or self._find_caller(row.owner) is None:
            return "cancelled"
        return "expired" if time.time() >= row.expires_at else None

    async def bring_on(self, row: BatchRow) -> None:
        """Bring a batch to its next status.

        Raises:
            Failed, OSError: the disk fails.
        """
        end = self.why_stop(row)
        if end is None and row.status == "validating":
            await self._validate(row)
            return
        if end is None and row.status == "in_progress":
            await self._answer_all(row)
            values = {"status": "finalizing", "finalizing_at": int(time.time())}
            if not await self._store.change(row.id, "in_progress", **values):
                return  # cancelled meanwhile
        await self._end(row, end or "completed")

    async def _validate(self, row: BatchRow) -> None:
        """Check all lines; the batch begins, or fails."""
        path = self._files.path(row.input_file_id)
        checked = check_lines(path, row.endpoint, self._bounds.max_requests)
        errors: list[dict[str, object]] = []
        num_lines = 0
        while chunk := await asyncio.to_thread(_take, checked):
            num_lines += len(chunk)
            errors += [_problem(number, one) for number, one in chunk if one is not None]
            if len(errors) >= MAX_ERRORS:
                break
        now = int(time.time())
        values: dict[str, object]
        if errors:
            values = {"status": "failed", "errors": errors[:MAX_ERRORS], "ended_at": now}
        else:
            values = {"status": "in_progress", "num_requests": num_lines, "in_progress_at": now}
        await self._store.change(row.id, "validating", **values)

    async def _answer_all(self, row: BatchRow) -> None:
        """Answer all requests without a result.

        A batch whose results have no room pauses until files are deleted, or the batch ends.
        """
        seen_s, is_told = -math.inf, False
        async with asyncio.TaskGroup() as tasks:
            async for number, line in self._open_lines(row):
                while time.monotonic() - seen_s > _ROOM_S:
                    if await self._has_room(row.owner):
                        seen_s = time.monotonic()
                        break
                    if not is_told:
                        text = "batch %s pauses until its results have room: delete files"
                        _logger.warning(text, row.id)
                    is_told = True
                    await asyncio.sleep(_ROOM_S)
                await self._free.acquire()
                task = tasks.create_task(self._answer(row, number, line))
                task.add_done_callback(lambda _: self._free.release())

    async def _has_room(self, owner: str) -> bool:
        """Return whether results of an owner may be stored."""
        bounds = self._bounds
        if await self._store.bytes_of(owner) >= bounds.max_key_bytes:
            return False
        return await self._store.bytes_of() < bounds.max_bytes

    async def _open_lines(self, row: BatchRow) -> AsyncIterator[tuple[int, BatchLine]]:
        """Yield the requests without a result."""
        done = frozenset(await self._store.done_lines(row.id))
        lines = lines_of(self._files.path(row.input_file_id), row.endpoint, done)
        while chunk := await asyncio.to_thread(_take, lines):
            for number, line in chunk:
                yield number, line

    async def _answer(self, row: BatchRow, number: int, line: BatchLine) -> None:
        """Answer one request, and store the result."""
        num_tries, pause_s = 0, _RETRY_S
        while True:
            caller = self._find_caller(row.owner)
            if caller is None:
                return  # the batch is about to be stopped
            answer = await self._ask(caller, line.url, bytes(line.body))
            is_momentary = answer.status in _TRY_AGAIN
            num_tries += not is_momentary
            if not is_momentary and (answer.status < 500 or num_tries == _MAX_TRIES):
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)
        body = result_line(line.custom_id, answer.status, answer.request_id, answer.body)
        await self._store.add_result(row.id, ResultRow(number, answer.status >= 400, body))

    async def _end(self, row: BatchRow, status: BatchStatus) -> None:
        """Write the files of the results, and end the batch."""
        found = [
            await self._results_file(row, "batch_output", status),
            await self._results_file(row, "batch_error", status),
        ]
        kept = [one for one in found if one is not None]
        await self._store.end(row.id, status, int(time.time()), kept)

    async def _results_file(
        self, row: BatchRow, purpose: str, status: BatchStatus
    ) -> FileRow | None:
        """Write the results that belong into one file; return None without results."""
        file = await asyncio.to_thread(self._files.begin)
        try:
            await self._write_results(file, row, has_failed=purpose == "batch_error")
            if status == "expired" and purpose == "batch_error":
                async for _, line in self._open_lines(row):
                    file.write_lines([expired_line(line.custom_id)])
            if not file.num_bytes:
                file.discard()
                return None
            await asyncio.to_thread(file.keep)
        except BaseException:
            file.discard()
            raise
        name = f"{row.id}_{purpose.removeprefix('batch_')}.jsonl"
        return FileRow(file.id, row.owner, purpose, name, file.num_bytes, int(time.time()))

    async def _write_results(self, file: NewFile, row: BatchRow, *, has_failed: bool) -> None:
        after = -1
        while page := await self._store.results(row.id, has_failed=has_failed, after_line=after):
            await asyncio.to_thread(file.write_lines, [one.body for one in page])
            after = page[-1].line


def _take(items: Iterator[T]) -> list[T]:
    return list(islice(items, _CHUNK))


def _problem(number: int, problem: LineProblem) -> dict[str, object]:
    return {
        "code": problem.code,
        "message": str(problem),
        "param": problem.param,
        "line": number + 1,
    }
