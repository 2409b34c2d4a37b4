"""The routes of ``/v1/files`` and ``/v1/batches``, OpenAI's protocol.

A caller sees the files and batches of the caller's key only; callers without a key share theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from gpupool_state.batches import BatchRow, BatchStore, FileRow
from gpupoold.frontend.batches.input_file import ENDPOINTS
from gpupoold.frontend.batches.limits import BatchBounds
from gpupoold.frontend.batches.objects import batch_object, file_object, list_object
from gpupoold.frontend.batches.stored_files import StoredFiles, new_id
from gpupoold.frontend.body import BODY_TIMEOUT_S, Disconnected, read_body
from gpupoold.frontend.callers import Caller
from gpupoold.frontend.errors import (
    ApiError,
    bad_request,
    method_not_allowed,
    no_such_path,
    over_rate,
    send_json,
    too_large,
    too_slow,
)
from gpupoold.frontend.in_flight import BytesInFlight
from gpupoold.frontend.mounts import Receive, Scope, Send
from gpupoold.units import format_duration, parse_duration_s

FILES, BATCHES = "/v1/files", "/v1/batches"

_MAX_UPLOADS = 4
_MAX_FORM_BYTES = 64 << 10
_MAX_BODY_BYTES = 1 << 20
_MAX_UNDER_WAY = 100
_MAX_NAME_CHARS = 255
_MAX_PAGE = 100
_MIN_WINDOW_S, _MAX_WINDOW_S = 60.0, 7 * 86_400.0
_MAX_METADATA, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512
_PIECE_BYTES = 1 << 18


class _NewBatch(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


class BatchApi:
    """Serves files and batches; ``in_flight`` counts the bytes of bodies."""

    def __init__(
        self, store: BatchStore, files: StoredFiles, bounds: BatchBounds, in_flight: BytesInFlight
    ) -> None:
        self._store = store
        self._files = files
        self._bounds = bounds
        self._in_flight = in_flight
        self._uploads = asyncio.Semaphore(_MAX_UPLOADS)

    async def serve(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to a path of files or batches.

        Raises:
            ApiError: the request is wrong, or there is no room.
            Failed, OSError: the disk fails.
        """
        method, path = scope["method"], scope["path"]
        prefix = FILES if path.startswith(FILES) else BATCHES
        item_id, _, action = path[len(prefix) :].removeprefix("/").partition("/")
        match prefix, method, bool(item_id), action:
            case "/v1/files", "POST", False, "":
                await send_json(send, 200, await self._upload(caller, scope, receive))
            case "/v1/files", "GET", False, "":
                await send_json(send, 200, await self._list_files(caller, scope))
            case "/v1/files", "GET", True, "":
                await send_json(send, 200, file_object(await self._file(caller, item_id)))
            case "/v1/files", "GET", True, "content":
                await self._send_content(await self._file(caller, item_id), send)
            case "/v1/files", "DELETE", True, "":
                await send_json(send, 200, await self._delete(await self._file(caller, item_id)))
            case "/v1/batches", "POST", False, "":
                await send_json(send, 200, await self._create(caller, scope, receive))
            case "/v1/batches", "GET", False, "":
                await send_json(send, 200, await self._list_batches(caller, scope))
            case "/v1/batches", "GET", True, "":
                await send_json(send, 200, batch_object(await self._batch(caller, item_id)))
            case "/v1/batches", "POST", True, "cancel":
                await send_json(send, 200, await self._cancel(caller, item_id))
            case _ if action in ("", "content", "cancel"):
                raise method_not_allowed(method, path)
            case _:
                raise no_such_path(method, path)

    async def _upload(self, caller: Caller, scope: Scope, receive: Receive) -> dict[str, Any]:
        await self._check_room(caller, _declared_bytes(scope))
        if self._uploads.locked():
            raise over_rate(f"{_MAX_UPLOADS} files are being uploaded at the moment.", 5.0)
        async with self._uploads, self._form(scope, receive) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise bad_request("The form has no field `file` with a file.", param="file")
            if purpose != "batch":
                raise bad_request("The purpose of a file must be `batch`.", param="purpose")
            await self._check_room(caller, file.size or 0)
            kept = await asyncio.to_thread(self._files.save, file.file)
            name = (file.filename or kept.id)[:_MAX_NAME_CHARS]
        now = int(time.time())
        row = FileRow(kept.id, caller.key_id, "batch", name, kept.num_bytes, now)
        await self._store.add_file(row)
        return file_object(row)

    @contextlib.asynccontextmanager
    async def _form(self, scope: Scope, receive: Receive) -> AsyncIterator[FormData]:
        """Read a form with one file, which is kept in a temporary file."""
        bounded = _bounded(receive, self._bounds.max_file_bytes + _MAX_FORM_BYTES)
        request = Request(scope, bounded)
        try:
            async with request.form(
                max_files=1, max_fields=8, max_part_size=_MAX_FORM_BYTES
            ) as form:
                yield form
        except MultiPartException as error:
            raise bad_request(f"The form cannot be read: {error.message}") from error
        except TimeoutError:
            raise too_slow(BODY_TIMEOUT_S) from None

    async def _check_room(self, caller: Caller, num_bytes: int) -> None:
        """Raise ApiError: 413 or 429: a file of this size exceeds a bound."""
        bounds = self._bounds
        if num_bytes > bounds.max_file_bytes + _MAX_FORM_BYTES:
            raise too_large(bounds.max_file_bytes)
        for bound, owner, whose in (
            (bounds.max_key_bytes, caller.key_id, "Your files and results"),
            (bounds.max_bytes, None, "All files and results"),
        ):
            if await self._store.bytes_of(owner) + num_bytes > bound:
                text = f"{whose} may have at most {bound:,} bytes: delete files first."
                raise over_rate(text, 60.0)

    async def _list_files(self, caller: Caller, scope: Scope) -> dict[str, Any]:
        limit, after = _page(scope)
        rows = await self._store.files(caller.key_id, limit + 1, after)
        return list_object([file_object(row) for row in rows], limit)

    async def _file(self, caller: Caller, file_id: str) -> FileRow:
        row = await self._store.file(file_id, caller.key_id)
        if row is None:
            raise _not_found("file", file_id)
        return row

    async def _send_content(self, row: FileRow, send: Send) -> None:
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(row.num_bytes).encode()),
        ]
        with await asyncio.to_thread(self._files.path(row.id).open, "rb") as file:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _delete(self, row: FileRow) -> dict[str, Any]:
        if await self._store.is_in_use(row.id):
            text = f"The file {row.id} is the input of a batch under way: cancel the batch first."
            raise ApiError(409, "ConflictError", text)
        await self._store.remove_file(row.id)
        await asyncio.to_thread(self._files.remove, row.id)
        return {"id": row.id, "object": "file", "deleted": True}

    async def _create(self, caller: Caller, scope: Scope, receive: Receive) -> dict[str, Any]:
        with self._in_flight.holding(caller.key_id) as holding:
            body = await read_body(scope, receive, _MAX_BODY_BYTES, holding)
            try:
                asked = msgspec.json.decode(body, type=_NewBatch)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise bad_request(f"The request body is no batch: {error}.") from error
        window_s = _checked(asked)
        file = await self._file(caller, asked.input_file_id)
        if len(await self._store.under_way(caller.key_id)) >= _MAX_UNDER_WAY:
            raise over_rate(f"{_MAX_UNDER_WAY} of your batches are under way already.", 60.0)
        now = int(time.time())
        row = BatchRow(
            new_id("batch_"),
            caller.key_id,
            asked.endpoint,
            file.id,
            asked.completion_window,
            now,
            now + round(window_s),
            metadata=asked.metadata or {},
        )
        await self._store.add_batch(row)
        return batch_object(row)

    async def _list_batches(self, caller: Caller, scope: Scope) -> dict[str, Any]:
        limit, after = _page(scope)
        rows = await self._store.batches(caller.key_id, limit + 1, after)
        return list_object([batch_object(row) for row in rows], limit)

    async def _batch(self, caller: Caller, batch_id: str) -> BatchRow:
        row = await self._store.batch(batch_id, caller.key_id)
        if row is None:
            raise _not_found("batch", batch_id)
        return row

    async def _cancel(self, caller: Caller, batch_id: str) -> dict[str, Any]:
        row = await self._batch(caller, batch_id)
        if row.status in ("validating", "in_progress"):
            values = {"status": "cancelling", "cancelling_at": int(time.time())}
            if not await self._store.change(row.id, row.status, **values):
                return await self._cancel(caller, batch_id)  # the status has just changed
        elif row.status not in ("cancelling", "cancelled"):
            text = f"The batch {batch_id} is {row.status}, and cannot be cancelled."
            raise ApiError(409, "ConflictError", text)
        return batch_object(await self._batch(caller, batch_id))


def _checked(asked: _NewBatch) -> float:
    """Return the completion window of a valid batch in seconds.

    Raises:
        ApiError: 400.
    """
    if asked.endpoint not in ENDPOINTS:
        text = f"The endpoint of a batch is one of {', '.join(sorted(ENDPOINTS))}."
        raise bad_request(text, param="endpoint")
    try:
        window_s = parse_duration_s(asked.completion_window[:32])
    except ValueError as error:
        raise bad_request(f"{error}.", param="completion_window") from None
    if not _MIN_WINDOW_S <= window_s <= _MAX_WINDOW_S:
        shortest, longest = map(format_duration, (_MIN_WINDOW_S, _MAX_WINDOW_S))
        text = f"A completion window is {shortest} to {longest}, such as 24h."
        raise bad_request(text, param="completion_window")
    metadata = asked.metadata or {}
    is_long = any(
        len(key) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS
        for key, value in metadata.items()
    )
    if is_long or len(metadata) > _MAX_METADATA:
        text = (
            f"Metadata has at most {_MAX_METADATA} pairs, keys of {_MAX_KEY_CHARS} and values of "
            f"{_MAX_VALUE_CHARS} characters."
        )
        raise bad_request(text, param="metadata")
    return window_s


def _page(scope: Scope) -> tuple[int, str | None]:
    """Return the parameters ``limit`` and ``after`` of a list.

    Raises:
        ApiError: 400.
    """
    try:
        found = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=16)
        limit = int(found.get("limit", ["20"])[-1])
    except ValueError:
        limit = 0
    if not 1 <= limit <= _MAX_PAGE:
        raise bad_request(f"`limit` is a number from 1 to {_MAX_PAGE}.", param="limit")
    return limit, found.get("after", [None])[-1]


def _bounded(receive: Receive, max_bytes: int) -> Receive:
    """Return ``receive`` for a body of at most ``max_bytes`` that arrives without long pauses."""
    num_bytes = 0

    async def receive_bounded() -> MutableMapping[str, Any]:
        nonlocal num_bytes
        async with asyncio.timeout(BODY_TIMEOUT_S):
            message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise too_large(max_bytes)
        return message

    return receive_bounded


def _declared_bytes(scope: Scope) -> int:
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(lengths[-1]) if lengths and lengths[-1].isdigit() else 0


def _not_found(kind: str, item_id: str) -> ApiError:
    return ApiError(404, "NotFoundError", f"There is no {kind} {item_id[:100]!r}.")
