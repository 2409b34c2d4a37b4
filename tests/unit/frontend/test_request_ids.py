"""Ids that the server makes, and what becomes of a client's own."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from gpupoold.frontend.errors import ApiError
from gpupoold.frontend.request_context import (
    RequestIds,
    make_engine_id,
    request_ids,
    sending_id,
    with_id,
)


def test_engine_requests_are_called_by_their_http_request() -> None:
    ids = RequestIds()
    assert re.fullmatch("[0-9a-f]{32}", ids.http_id)

    async def ask() -> list[str]:
        with request_ids.holding(ids):
            tasks = [asyncio.create_task(asyncio.to_thread(make_engine_id)) for _ in range(3)]
            return list(await asyncio.gather(*tasks))

    made = asyncio.run(ask())
    assert sorted(made) == [ids.http_id, f"{ids.http_id}-2", f"{ids.http_id}-3"]
    assert make_engine_id() != make_engine_id()  # of no HTTP request: each has its own


def test_the_api_gets_an_id() -> None:
    ids, scope = RequestIds(), {"headers": [(b"host", b"x")]}
    assert with_id(scope, ids, body_has_id=True) is scope
    named = with_id(scope, ids, body_has_id=False)["headers"]
    assert named == [(b"host", b"x"), (b"x-request-id", ids.http_id.encode())]
    own = {"headers": [(b"x-request-id", b"mine")]}
    assert with_id(own, ids, body_has_id=False) is own


@pytest.mark.parametrize("sent", [b"", b"x" * 129, b"a b", b"\xff", b"\x07"])
def test_headers_that_are_no_ids(sent: bytes) -> None:
    with pytest.raises(ApiError, match="`X-Request-Id` must be a string of 1 to 128"):
        with_id({"headers": [(b"x-request-id", sent)]}, RequestIds(), body_has_id=True)


def test_the_answer_tells_the_servers_id_once() -> None:
    ids, sent = RequestIds(), []

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer() -> None:
        tell = sending_id(send, ids)
        headers = [(b"a", b"b"), (b"X-Request-Id", b"mine")]
        await tell({"type": "http.response.start", "status": 200, "headers": headers})
        await tell({"type": "http.response.body", "body": b"x"})

    asyncio.run(answer())
    assert sent[0]["headers"] == [(b"a", b"b"), (b"x-request-id", ids.http_id.encode())]
    assert sent[1] == {"type": "http.response.body", "body": b"x"}
