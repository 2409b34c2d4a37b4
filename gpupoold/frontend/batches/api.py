"""The routes of ``/v1/files`` and ``/v1/batches``, OpenAI's protocol, and the uploads of forms.

A caller sees the files and batches of the caller's key only; callers without a key share theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gpupool_state.batches import Account, BatchRow, BatchStore, FileRow, Order
from gpupoold.config.sections import BatchSettings
from gpupoold.frontend.batches.files import ENDPOINTS, StoredFiles, new_id
from gpupoold.frontend.batches.places import Places
from gpupoold.frontend.body import (
    BODY_TIMEOUT_S,
    Disconnected,
    declared_length,
    read_body,
    without_bom,
)
from gpupoold.frontend.callers import Caller
from gpupoold.frontend.errors import (
    ApiError,
    bad_request,
    no_such_path,
    over_rate,
    send_json,
    too_large,
)
from gpupoold.frontend.request_context import BytesInFlight
from gpupoold.units import format_duration, parse_duration_s

FILES, BATCHES = "/v1/files", "/v1/batches"

_MAX_BODY_BYTES = 1 << 20
_MAX_UNDER_WAY = 100
_MAX_NAME_CHARS = 255
_MAX_WINDOW_CHARS = 32
_MIN_WINDOW_S, _MAX_WINDOW_S = 60.0, 7 * 86_400.0
_MAX_METADATA, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512
_PIECE_BYTES = 1 << 18

_ENDED_AT = ("completed", "failed", "expired", "cancelled")
_MAX_PAGE_BYTES = 1 << 18

# A page has no more rows, whatever the limit; clients ask for the next page.
_MAX_ROWS = 1000
_MIN_KEPT_S, _MAX_KEPT_S = 3600, 2_592_000
_ORDERS: dict[str, Order] = {"asc": "asc", "desc": "desc"}

MAX_UPLOADS = 4
MAX_WAITING = 16
MAX_FORM_BYTES = 64 << 10
"""The largest form beside its file: fields, heads of parts, text before and after the parts."""
_MAX_FIELDS, _MAX_FIELD_BYTES = 8, 1 << 10
_MAX_CONTENT_TYPE_BYTES = 512
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=?* -]{1,70}")  # RFC 2046, and a star
_WAIT_S = 60.0
_MIN_BYTES_PER_S = 32 << 10


class ExpiresAfter(msgspec.Struct):
    """When a file expires: ``seconds`` after the creation, the only anchor that OpenAI has."""

    anchor: str
    seconds: int

    def check(self, param: str) -> None:
        if self.anchor != "created_at":
            raise bad_request("The anchor of an expiry is `created_at`.", f"{param}.anchor")
        if not _MIN_KEPT_S <= self.seconds <= _MAX_KEPT_S:
            text = f"A file expires after {_MIN_KEPT_S:,} to {_MAX_KEPT_S:,} seconds."
            raise bad_request(text, f"{param}.seconds")


def expiry_of_form(form: FormData) -> ExpiresAfter | None:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    is_number = isinstance(seconds, str) and len(seconds) < 10 and seconds.isdecimal()
    found = ExpiresAfter(str(anchor), int(str(seconds)) if is_number else 0)
    found.check("expires_after")
    return found


class Page(NamedTuple):
    """A part of a list; ``purpose`` None: of any purpose."""

    limit: int
    after: str | None
    order: Order
    purpose: str | None

    @property
    def num_rows(self) -> int:
        """The rows to read: one more than the page has, which tells of a further page."""
        return self.limit + 1


def read_page(scope: Scope, *, max_limit: int, default: int) -> Page:
    try:
        found = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=16)
        limit = int(found.get("limit", [str(default)])[-1][:10])
    except ValueError:
        limit = 0
        found = {}
    if not 1 <= limit <= max_limit:
        raise bad_request(f"`limit` is a number from 1 to {max_limit:,}.", param="limit")
    order = _ORDERS.get(found.get("order", ["desc"])[-1])
    if order is None:
        raise bad_request("`order` is asc or desc.", param="order")
    after, purpose = found.get("after", [None])[-1], found.get("purpose", [None])[-1]
    return Page(min(limit, _MAX_ROWS), after, order, purpose)


class _NewBatch(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchApi:
    """Serves files and batches; ``in_flight`` counts the bytes of bodies."""

    def __init__(
        self, store: BatchStore, files: StoredFiles, bounds: BatchSettings, in_flight: BytesInFlight
    ) -> None:
        self._store = store
        self._files = files
        self._bounds = bounds
        self._in_flight = in_flight
        self._uploads = Uploads(bounds.max_file_bytes)

    async def serve(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to a path of files or batches.

        Raises ApiError: the request is wrong, or there is no room. Failed, OSError: the disk fails.
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
            case _:
                raise no_such_path(method, path)

    async def _upload(self, caller: Caller, scope: Scope, receive: Receive) -> dict[str, Any]:
        await self._check_room(caller, declared_length(scope))
        async with self._uploads.form(caller.key_id, scope, receive) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise bad_request("The form has no field `file` with a file.", param="file")
            if form.get("purpose") != "batch":
                raise bad_request("The purpose of a file must be `batch`.", param="purpose")
            expires_after = expiry_of_form(form)
            await self._check_room(caller, file.size or 0)
            kept = await asyncio.to_thread(self._files.save, file.file)
            name = (file.filename or kept.id)[:_MAX_NAME_CHARS]
        now = int(time.time())
        expires_at = None if expires_after is None else now + expires_after.seconds
        row = FileRow(kept.id, caller.key_id, "batch", name, kept.num_bytes, now, expires_at)
        try:
            await self._store.add_file(row, self._check_account)
        except ApiError:
            await asyncio.to_thread(self._files.remove, kept.id)
            raise
        return file_object(row)

    async def _check_room(self, caller: Caller, num_bytes: int) -> None:
        """Check that a file of this size may be added, before the file is read.

        Raises ApiError: 413 or 429; the file exceeds a bound.
        """
        if num_bytes > self._bounds.max_file_bytes + MAX_FORM_BYTES:
            raise too_large(self._bounds.max_file_bytes)
        had = await self._store.account(caller.key_id)
        account = Account(had.num_bytes + num_bytes, had.num_files + 1, had.num_batches)
        self._check_account(account, await self._store.num_bytes() + num_bytes)

    def _check_account(self, account: Account, num_bytes_of_all: int) -> None:
        """Check that an owner, and all owners together, have no more than allowed."""
        bounds = self._bounds
        for had, bound, what in (
            (account.num_bytes, bounds.max_key_bytes, "Your files, batches and results: bytes"),
            (account.num_files, bounds.max_key_files, "Your files: number"),
            (account.num_batches, bounds.max_key_batches, "Your batches: number"),
            (num_bytes_of_all, bounds.max_bytes, "Files, batches and results of all: bytes"),
        ):
            if had > bound:
                text = f"{what} is at most {bound:,}. Delete files; ended batches go with time."
                raise over_rate(text, 60.0)

    async def _list_files(self, caller: Caller, scope: Scope) -> dict[str, Any]:
        page = read_page(scope, max_limit=10_000, default=10_000)
        rows = await self._store.files(
            caller.key_id, page.num_rows, page.after, page.order, page.purpose
        )
        return list_object(map(file_object, rows), page.limit)

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
            raise ApiError(409, text)
        await self._store.remove_file(row.id)
        await asyncio.to_thread(self._files.remove, row.id)
        return {"id": row.id, "object": "file", "deleted": True}

    async def _create(self, caller: Caller, scope: Scope, receive: Receive) -> dict[str, Any]:
        with self._in_flight.holding(caller.key_id) as holding:
            body = without_bom(await read_body(scope, receive, _MAX_BODY_BYTES, holding))
            try:
                asked = msgspec.json.decode(body, type=_NewBatch)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise bad_request(f"The request body is no batch: {error}.") from error
        window_s = _checked(asked)
        file = await self._file(caller, asked.input_file_id)
        if await self._store.num_under_way(caller.key_id) >= _MAX_UNDER_WAY:
            raise over_rate(f"{_MAX_UNDER_WAY} of your batches are under way already.", 60.0)
        now, kept = int(time.time()), asked.output_expires_after
        row = BatchRow(
            new_id("batch_"),
            asked.endpoint,
            now,
            now + round(window_s),
            owner=caller.key_id,
            input_file_id=file.id,
            completion_window=asked.completion_window,
            metadata=asked.metadata or {},
            output_expires_after_s=None if kept is None else kept.seconds,
        )
        await self._store.add_batch(row, self._check_account)
        return batch_object(row)

    async def _list_batches(self, caller: Caller, scope: Scope) -> dict[str, Any]:
        page = read_page(scope, max_limit=100, default=20)
        rows = await self._store.batches(caller.key_id, page.num_rows, page.after, page.order)
        return list_object(map(batch_object, rows), page.limit)

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
            raise ApiError(409, text)
        return batch_object(await self._batch(caller, batch_id))


def _checked(asked: _NewBatch) -> float:
    if asked.endpoint not in ENDPOINTS:
        text = f"The endpoint of a batch is one of {', '.join(sorted(ENDPOINTS))}."
        raise bad_request(text, param="endpoint")
    try:
        window_s = parse_duration_s(asked.completion_window[:_MAX_WINDOW_CHARS])
    except ValueError as error:
        raise bad_request(f"{error}.", param="completion_window") from None
    is_long = len(asked.completion_window) > _MAX_WINDOW_CHARS
    if is_long or not _MIN_WINDOW_S <= window_s <= _MAX_WINDOW_S:
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
    if asked.output_expires_after is not None:
        asked.output_expires_after.check("output_expires_after")
    return window_s


def _not_found(kind: str, item_id: str) -> ApiError:
    return ApiError(404, f"There is no {kind} {item_id[:100]!r}.")


def file_object(row: FileRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "file",
        "bytes": row.num_bytes,
        "created_at": row.created_at,
        "filename": row.filename,
        "purpose": row.purpose,
        "status": "processed",
        **({} if row.expires_at is None else {"expires_at": row.expires_at}),
    }


def batch_object(row: BatchRow) -> dict[str, Any]:
    """Return a batch as an object of the API.

    ``status_details``, which OpenAI does not have, says why requests wait.
    """
    ended = {f"{status}_at": row.ended_at if row.status == status else None for status in _ENDED_AT}
    return {
        "id": row.id,
        "object": "batch",
        "endpoint": row.endpoint,
        "errors": {"object": "list", "data": row.errors} if row.errors else None,
        "input_file_id": row.input_file_id,
        "completion_window": row.completion_window,
        "status": row.status,
        "output_file_id": row.output_file_id,
        "error_file_id": row.error_file_id,
        "created_at": row.created_at,
        "in_progress_at": row.in_progress_at,
        "expires_at": row.expires_at,
        "finalizing_at": row.finalizing_at,
        "cancelling_at": row.cancelling_at,
        **ended,
        "request_counts": {
            "total": row.num_requests,
            "completed": row.num_completed,
            "failed": row.num_failed,
        },
        "metadata": row.metadata or None,
        "status_details": (
            {"reason": row.waits_because, "next_try_at": row.next_try_at}
            if row.waits_because
            else None
        ),
    }


def list_object(items: Iterable[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return a page of at most ``limit`` items and about ``_MAX_PAGE_BYTES``.

    One item more tells of a further page.
    """
    page: list[dict[str, Any]] = []
    num_bytes, has_more = 0, False
    for item in items:
        has_more = len(page) == limit or num_bytes >= _MAX_PAGE_BYTES
        if has_more:
            break
        page.append(item)
        num_bytes += len(json.dumps(item))
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": has_more,
    }


class Uploads:
    """Reads forms, ``MAX_UPLOADS`` at once, of which one key has at most half.

    Further forms wait in turns of the keys.

    Of the content type only the boundary is used. The client's ``charset``, which today's clients
    do not send, could name a codec that takes seconds for a field, or that raises errors of its
    own.
    """

    def __init__(self, max_file_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._max_bytes = max_file_bytes + MAX_FORM_BYTES
        self._places = Places(MAX_UPLOADS, owner_share=1, group_share=1)

    @contextlib.asynccontextmanager
    async def form(self, key_id: str, scope: Scope, receive: Receive) -> AsyncIterator[FormData]:
        """Read a form with one file, which is kept in a temporary file.

        Raises:
            ApiError: 400, 408, 413 or 429.
            Disconnected: the client has disconnected.
        """
        request = Request(
            _with_boundary_only(scope), _bounded(receive, self._max_bytes, self._clock)
        )
        await self._begin(key_id)
        try:
            form = await _read(request)
            try:
                yield form
            finally:
                await form.close()
        finally:
            self._places.release(key_id)

    async def _begin(self, key_id: str) -> None:
        if self._places.num_waiting(key_id) >= MAX_WAITING:
            raise over_rate(f"{MAX_WAITING} of your uploads wait for their turn already.", 5.0)
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._places.take(key_id)
        except TimeoutError:
            text = f"Other uploads have not left room for this one within {_WAIT_S:g} s."
            raise over_rate(text, 5.0) from None


async def _read(request: Request) -> FormData:
    try:
        return await request.form(
            max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES
        )
    except (MultiPartException, UnicodeError) as error:
        reason = getattr(error, "message", error)
        raise bad_request(f"The form cannot be read: {reason}") from error


def _with_boundary_only(scope: Scope) -> Scope:
    """Return the request with a content type that has no parameter but the boundary."""
    types = [value for name, value in scope["headers"] if name == b"content-type"]
    found = types[-1] if types and len(types[-1]) <= _MAX_CONTENT_TYPE_BYTES else b""
    kind, options = parse_options_header(found)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not _BOUNDARY.fullmatch(boundary):
        raise bad_request(
            "The body must be a form: the content type multipart/form-data with a boundary of 1 "
            "to 70 characters."
        )
    content_type = (b"content-type", b'multipart/form-data; boundary="' + boundary + b'"')
    others = [header for header in scope["headers"] if header[0] != b"content-type"]
    return {**scope, "headers": [*others, content_type]}


def _bounded(receive: Receive, max_bytes: int, clock: Callable[[], float]) -> Receive:
    """Return ``receive`` for a body of at most ``max_bytes``, with a least rate.

    The body may take ``BODY_TIMEOUT_S`` and a second for each ``_MIN_BYTES_PER_S`` received.
    """
    num_bytes, begun_s = 0, None

    async def receive_bounded() -> MutableMapping[str, Any]:
        nonlocal num_bytes, begun_s
        begun_s = clock() if begun_s is None else begun_s
        limit_s = begun_s + BODY_TIMEOUT_S + num_bytes / _MIN_BYTES_PER_S
        try:
            async with asyncio.timeout(limit_s - clock()):
                message = await receive()
        except TimeoutError:
            text = (
                f"The file arrives too slowly: {num_bytes:,} bytes. An upload may take "
                f"{BODY_TIMEOUT_S:g} s and a second for each {_MIN_BYTES_PER_S:,} bytes."
            )
            raise ApiError(408, text) from None
        if message["type"] == "http.disconnect":
            raise Disconnected
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise too_large(max_bytes - MAX_FORM_BYTES)
        return message

    return receive_bounded
