"""One batch: its input is checked, its requests are answered, its files are written.

Each request goes through the frontend's own application, as from a client with the batch's key, but
with background priority. A stored result is never computed again; a request whose result was not
stored is asked again. A refused request is left for a later pass over the input file, and holds
neither a place nor memory until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, TypeVar

import msgspec

from gpupool_state.batches import BatchRow, BatchStatus, BatchStore, FileRow, ResultRow
from gpupoold.config.sections import BatchSettings
from gpupoold.frontend.batches.files import (
    MAX_ERRORS,
    BatchLine,
    LineProblem,
    StoredFiles,
    check_lines,
    lines_of,
    new_id,
)
from gpupoold.frontend.batches.places import Places
from gpupoold.frontend.callers import Caller

T = TypeVar("T")
# Lines that are read, checked or written at once, in a thread, and their bytes.
_CHUNK = 200
_CHUNK_BYTES = 1 << 18
# Shortest time between two passes over an input file.
_PASS_S = 1.0
# Time between two looks for room. Results of the requests that run may exceed a bound of space.
_ROOM_S = 5.0
_MAX_MODELS, _MAX_NAME_CHARS = 8, 200
# Time without an answer after which the owner is told.
_STILL_S = 600.0
_STILL = "no request was answered for 10m: they run, or wait for a place or for a device"
_NO_ROOM = "the results have no room until files are deleted, see max_bytes in [batches]"

MAX_REFUSALS = 100
GIVE_UP_S = 6 * 3600.0
MAX_FAILURES = 3
_OF_THE_MOMENT = frozenset({429, 503})
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 300.0

_encoder = msgspec.json.Encoder()


class JsonAnswer(NamedTuple):
    """An HTTP answer with JSON; ``reason`` is the message of an error."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float = 0.0
    reason: str = ""


# Ends of frontends during a request after which the request is not asked again.
_MAX_ENDS = 3
_ENDED_FRONTENDS = JsonAnswer(
    422,
    "",
    b'{"error": {"message": "Three frontends have ended during this request, the third while the '
    b'request was asked alone.", "type": "Unprocessable Entity", "param": null, '
    b'"code": "request_ended_frontend"}}',
)
Ask = Callable[[Caller, str, bytes], Awaitable[JsonAnswer]]
FindCaller = Callable[[str], Caller | None]
TellWait = Callable[[BatchRow, str], None]


@dataclass(eq=False)
class BatchWorker:
    """Works on batches; ``ask`` answers one request, ``find_caller`` finds an owner by id.

    ``places`` bounds the requests of all batches that run at once. ``tell_wait`` is told about a
    batch whose requests begin to wait, and why.
    """

    store: BatchStore
    files: StoredFiles
    ask: Ask
    find_caller: FindCaller
    places: Places
    bounds: BatchSettings
    tell_wait: TellWait
    _answering: dict[str, _Batch] = field(default_factory=dict, init=False)
    _alone: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _num_ends: dict[tuple[str, int], int] = field(default_factory=dict, init=False)

    async def recall(self) -> None:
        """Read which requests were under way when earlier frontends ended; to be called first."""
        self._num_ends = await self.store.asked()

    def why_stop(self, row: BatchRow) -> BatchStatus | None:
        """Return the status in which a batch has to end now, None for a batch that may go on."""
        if row.status == "finalizing":
            return None
        if row.status == "cancelling" or self.find_caller(row.owner) is None:
            return "cancelled"
        return "expired" if time.time() >= row.expires_at else None

    async def bring_on(self, row: BatchRow) -> None:
        """Bring a batch to its next status. Raises Failed, OSError: the disk fails."""
        end = self.why_stop(row)
        if end is None and row.status == "validating":
            await self._validate(row)
            return
        if end is None and row.status == "in_progress":
            await self._answer_all(row)
            values = {"status": "finalizing", "finalizing_at": int(time.time())}
            if not await self.store.change(row.id, "in_progress", **values):
                return  # cancelled meanwhile
        await self._end(row, end or "completed")

    async def _validate(self, row: BatchRow) -> None:
        """Check all lines; the batch begins, or fails."""
        path = self.files.path(row.input_file_id)
        checked = check_lines(path, row.endpoint, self.bounds.max_requests)
        errors: list[dict[str, object]] = []
        models: dict[str, None] = {}
        num_lines = 0
        while chunk := await asyncio.to_thread(_take, checked):
            num_lines += len(chunk)
            errors += [_problem(line.number, line.problem) for line in chunk if line.problem]
            if len(models) < _MAX_MODELS:
                models |= dict.fromkeys(
                    line.model[:_MAX_NAME_CHARS] for line in chunk if line.model
                )
            if len(errors) >= MAX_ERRORS:
                break
        now = int(time.time())
        values: dict[str, object] = {"models": list(models)[:_MAX_MODELS]}
        if errors:
            values |= {"status": "failed", "errors": errors[:MAX_ERRORS], "ended_at": now}
        else:
            values |= {"status": "in_progress", "num_requests": num_lines, "in_progress_at": now}
        await self.store.change(row.id, "validating", **values)

    async def _answer_all(self, row: BatchRow) -> None:
        """Answer all requests without a result, in passes over the input file.

        A pass asks each request that is due. Each next pass begins when a refused request is due.
        """
        batch = self._answering[row.id] = _Batch(row, Repeats())
        try:
            while True:
                batch.has_skipped = False
                async with asyncio.TaskGroup() as tasks:
                    await self._pass(batch, tasks)
                if not batch.has_skipped:
                    return
                due_s = batch.repeats.due_s(time.monotonic())
                await self._note_wait(batch, batch.repeats.reason, due_s)
                await asyncio.sleep(max(due_s - time.monotonic(), _PASS_S))
        finally:
            del self._answering[row.id]

    async def note_if_still(self, row: BatchRow) -> None:
        """Note why a batch stands still whose requests are not refused.

        To be called from time to time.
        """
        batch = self._answering.get(row.id)
        if batch is None or batch.waits_because:
            return
        if time.monotonic() - batch.answered_s >= _STILL_S:
            await self._note_wait(batch, _STILL)

    async def _pass(self, batch: _Batch, tasks: asyncio.TaskGroup) -> None:
        """Begin to answer each request that is due, as far as there are places."""
        row = batch.row
        lines = self._due_lines(batch)
        while True:
            await self._wait_for_room(batch)
            # A line is read with a place only: batches that wait for places take no memory.
            await self.places.take(row.owner, row.id)
            try:
                found = await anext(lines, None)
            except BaseException:
                self.places.release(row.owner, row.id)
                raise
            if found is None:
                self.places.release(row.owner, row.id)
                return
            task = tasks.create_task(self._answer(batch, *found))
            task.add_done_callback(lambda _: self.places.release(row.owner, row.id))

    async def _wait_for_room(self, batch: _Batch) -> None:
        """Return when results of the batch may be stored."""
        while time.monotonic() - batch.had_room_s > _ROOM_S:
            if await self._has_room(batch.row.owner):
                batch.had_room_s = time.monotonic()
            else:
                await self._note_wait(batch, _NO_ROOM, time.monotonic() + _ROOM_S)
                await asyncio.sleep(_ROOM_S)

    async def _has_room(self, owner: str) -> bool:
        bounds = self.bounds
        if (await self.store.account(owner)).num_bytes >= bounds.max_key_bytes:
            return False
        return await self.store.num_bytes() < bounds.max_bytes

    async def _note_wait(self, batch: _Batch, reason: str, due_s: float | None = None) -> None:
        """Store why requests wait, and the time of the next try.

        An empty reason means that none waits any more.
        """
        if not reason and not batch.waits_because:
            return
        is_new, batch.waits_because = not batch.waits_because, reason
        next_try_at = None if due_s is None else round(time.time() + due_s - time.monotonic())
        values = {"waits_because": reason, "next_try_at": next_try_at}
        await self.store.change(batch.row.id, "in_progress", **values)
        if is_new:
            self.tell_wait(batch.row, reason)

    async def _due_lines(self, batch: _Batch) -> AsyncIterator[tuple[int, BatchLine]]:
        """Yield the requests without a result that may be asked now."""
        async for number, line in self._open_lines(batch.row):
            if batch.repeats.may_ask(number, line.model, time.monotonic()):
                yield number, line
            else:
                batch.has_skipped = True

    async def _open_lines(self, row: BatchRow) -> AsyncIterator[tuple[int, BatchLine]]:
        done = frozenset(await self.store.done_lines(row.id))
        lines = lines_of(self.files.path(row.input_file_id), row.endpoint, done)
        while chunk := await asyncio.to_thread(_take_lines, lines):
            for number, line in chunk:
                yield number, line

    async def _answer(self, batch: _Batch, number: int, line: BatchLine) -> None:
        row = batch.row
        caller = self.find_caller(row.owner)
        if caller is None:
            batch.has_skipped = True  # the batch is about to be stopped
            return
        answer = await self._asked(caller, row, number, line)
        now_s = time.monotonic()
        if not batch.repeats.is_result(
            number, line.model, answer.status, now_s, answer.retry_after_s, answer.reason
        ):
            batch.has_skipped = True
            await self.store.end_line(row.id, number)
            return
        batch.answered_s = now_s
        if not batch.repeats.reason:
            await self._note_wait(batch, "")
        body = result_line(line.custom_id, answer.status, answer.request_id, answer.body)
        await self.store.add_result(row.id, ResultRow(number, answer.status >= 400, body))

    async def _asked(
        self, caller: Caller, row: BatchRow, number: int, line: BatchLine
    ) -> JsonAnswer:
        """Ask one request, unless the request seems to end frontends.

        A request that was under way when two frontends ended is asked alone.
        """
        num_ends = self._num_ends.get((row.id, number), 0)
        if num_ends >= _MAX_ENDS:
            return _ENDED_FRONTENDS
        async with self._alone if num_ends == _MAX_ENDS - 1 else contextlib.nullcontext():
            await self.store.begin_line(row.id, number, num_ends + 1)
            return await self.ask(caller, line.url, line.body)

    async def _end(self, row: BatchRow, status: BatchStatus) -> None:
        kinds = ("batch_output", "batch_error")
        found = [await self._results_file(row, kind, status) for kind in kinds]
        kept = [file for file in found if file is not None]
        await self.store.end(row.id, status, int(time.time()), kept)

    async def _results_file(
        self, row: BatchRow, purpose: str, status: BatchStatus
    ) -> FileRow | None:
        """Write the results that belong into one file; return None without results."""
        file = await asyncio.to_thread(self.files.begin)
        try:
            has_failed, after = purpose == "batch_error", -1
            while page := await self.store.results(row.id, has_failed=has_failed, after_line=after):
                await asyncio.to_thread(file.write_lines, [result.body for result in page])
                after = page[-1].line
            if status == "expired" and has_failed:
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
        now, kept_s = int(time.time()), row.output_expires_after_s
        expires_at = None if kept_s is None else now + kept_s
        return FileRow(file.id, row.owner, purpose, name, file.num_bytes, now, expires_at)


@dataclass(slots=True)
class _Tries:
    """Tries of a request without a result.

    A refusal of the moment (429, 503) holds back all requests to the same model, because the
    refusal mostly concerns the model. Other failures of the server are repeated a few times. All
    other answers are results.
    """

    model: str
    since_s: float
    num_refusals: int = 0
    num_failures: int = 0
    due_s: float = 0.0


@dataclass(slots=True)
class _HeldModel:
    """A model whose latest request was refused."""

    since_s: float
    due_s: float
    reason: str


class Repeats:
    """The requests of one batch that wait for another try; times are seconds of one clock."""

    def __init__(self) -> None:
        self._lines: dict[int, _Tries] = {}
        self._held: dict[str, _HeldModel] = {}

    @property
    def reason(self) -> str:
        """Why requests wait; empty if none has been refused."""
        return next((model.reason for model in self._held.values()), "")

    def due_s(self, now_s: float) -> float:
        """Return the time of the next try, now if none is known."""
        dues = [model.due_s for model in self._held.values()]
        for line in self._lines.values():
            held = self._held.get(line.model)
            dues.append(line.due_s if held is None else max(line.due_s, held.due_s))
        return min((due_s for due_s in dues if due_s > now_s), default=now_s)

    def may_ask(self, number: int, model: str, now_s: float) -> bool:
        """Return whether the request in line ``number`` may be asked now."""
        line, held = self._lines.get(number), self._held.get(model)
        return (line is None or line.due_s <= now_s) and (held is None or held.due_s <= now_s)

    def is_result(
        self,
        number: int,
        model: str,
        status: int,
        now_s: float,
        retry_after_s: float = 0.0,
        reason: str = "",
    ) -> bool:
        """Note an answer; return False if the request has to be asked again.

        The latest refusal is the result after ``MAX_REFUSALS``, or when the request or the model
        has been refused for ``GIVE_UP_S``; the latest failure is the result after ``MAX_FAILURES``.
        """
        line = self._lines.pop(number, None) or _Tries(model, now_s)
        if status in _OF_THE_MOMENT:
            line.num_refusals += 1
            line.due_s = now_s + _pause_s(line.num_refusals, retry_after_s)
            held = self._held.get(model)
            since_s = now_s if held is None else held.since_s
            self._held[model] = _HeldModel(since_s, line.due_s, reason or f"HTTP status {status}")
            late_s = now_s - min(since_s, line.since_s)
            is_last = line.num_refusals >= MAX_REFUSALS or late_s >= GIVE_UP_S
        elif status >= 500:
            line.num_failures += 1
            line.due_s = now_s + _pause_s(line.num_failures)
            is_last = line.num_failures >= MAX_FAILURES
        else:
            self._held.pop(model, None)
            return True
        if not is_last:
            self._lines[number] = line
        return is_last


def _pause_s(num_tries: int, retry_after_s: float = 0.0) -> float:
    """Return the pause after a try: ``Retry-After``, or longer with each try, within a bound."""
    growing_s: float = _FIRST_PAUSE_S * 2 ** min(num_tries - 1, 20)
    return min(max(growing_s, retry_after_s), _MAX_PAUSE_S)


@dataclass(slots=True)
class _Batch:
    """A batch whose requests are being answered.

    ``has_skipped``: the present pass has left requests without a result.
    """

    row: BatchRow
    repeats: Repeats
    has_skipped: bool = False
    had_room_s: float = -math.inf
    answered_s: float = field(default_factory=time.monotonic)
    waits_because: str = field(init=False)

    def __post_init__(self) -> None:
        """Begin with what is stored."""
        self.waits_because = self.row.waits_because


def _take(items: Iterator[T]) -> list[T]:
    return list(islice(items, _CHUNK))


def _take_lines(lines: Iterator[tuple[int, BatchLine]]) -> list[tuple[int, BatchLine]]:
    """Return the next lines, of ``_CHUNK_BYTES`` and one line at most."""
    taken: list[tuple[int, BatchLine]] = []
    num_bytes = 0
    for line in islice(lines, _CHUNK):
        taken.append(line)
        num_bytes += len(line[1].body)
        if num_bytes >= _CHUNK_BYTES:
            break
    return taken


def _problem(number: int, problem: LineProblem) -> dict[str, object]:
    return {"code": problem.code, "message": str(problem), "param": problem.param, "line": number}


def result_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of an answered request; ``body`` is the answer's JSON."""
    try:
        answer = msgspec.Raw(msgspec.json.format(body, indent=-1))
    except msgspec.DecodeError:
        answer = msgspec.Raw(_encoder.encode(body.decode(errors="replace")))
    response = {"status_code": status, "request_id": request_id, "body": answer}
    return _line(custom_id, response, None)


def expired_line(custom_id: str) -> bytes:
    """Return the line of a request that was not answered within the completion window."""
    message = "This request could not be executed before the completion window expired."
    return _line(custom_id, None, {"code": "batch_expired", "message": message})


def _line(custom_id: str, response: object, error: object) -> bytes:
    fields = {"id": new_id("batch_req_"), "custom_id": custom_id}
    return _encoder.encode(fields | {"response": response, "error": error})
