"""The admin API's door: calls that may be made pass, others are told why not."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest

from gpupoold.access.peers import AdminGroups, Peer
from gpupoold.admin.app import Guard

OWN = Peer(1, os.geteuid(), frozenset())
STRANGER = Peer(2, 4_000_000, frozenset())


def call(peer: Peer, method: str, *headers: tuple[bytes, bytes]) -> tuple[int, Any]:
    """Status and body of a call by this peer."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b"null"})

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def made() -> None:
        groups = AdminGroups("no-such-group", "no-other-group")
        await Guard(app, groups)(scope, receive, send)

    state = {"peer": peer}
    scope = {"type": "http", "method": method, "state": state, "headers": headers}
    asyncio.run(made())
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_own_user_passes(method: str) -> None:
    assert call(OWN, method) == (204, None)


@pytest.mark.parametrize(
    ("method", "group"), [("GET", "no-other-group"), ("POST", "no-such-group")]
)
def test_stranger_is_told_the_command(method: str, group: str) -> None:
    status, body = call(STRANGER, method)
    assert status == 403
    assert body["error"]["code"] == "forbidden"
    assert f"usermod -aG {group} 4000000" in body["error"]["hint"]


def test_coded_body_is_refused_by_name() -> None:
    status, body = call(OWN, "POST", (b"content-encoding", b"gzip"))
    assert status == 415
    assert "gzip" in body["error"]["message"]


def test_call_without_a_known_caller_is_no_call() -> None:
    async def app(*_: object) -> None:
        raise AssertionError

    guard = Guard(app, AdminGroups("a", "b"))
    with pytest.raises(KeyError):
        asyncio.run(guard({"type": "http", "method": "GET"}, app, app))  # type: ignore[arg-type]
