"""Uploads: forms with one file, bounded in number, size, fields and time.

Of the content type only the boundary is used. The client's ``charset``, which today's clients do
not send, could name a codec that takes seconds for a field, or that raises errors of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.types import Receive, Scope

from gpupoold.frontend.body import BODY_TIMEOUT_S, Disconnected
from gpupoold.frontend.errors import ApiError, bad_request, over_rate, too_large
from gpupoold.frontend.places import Places

MAX_UPLOADS = 4
MAX_WAITING = 16
MAX_FORM_BYTES = 64 << 10
"""The largest form beside its file: fields, heads of parts, text before and after the parts."""
_MAX_FIELDS, _MAX_FIELD_BYTES = 8, 1 << 10
_MAX_CONTENT_TYPE_BYTES = 512
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=?* -]{1,70}")  # RFC 2046, and a star
_WAIT_S = 60.0
_MIN_BYTES_PER_S = 32 << 10


class Uploads:
    """Reads forms, ``MAX_UPLOADS`` at once, of which one key has at most half.

    Further forms wait in turns of the keys.
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
