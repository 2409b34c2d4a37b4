"""Cross-origin requests of web pages through the router."""

from __future__ import annotations

from typing import Any

import pytest

from gpupoold.access.secret import make_key
from gpupoold.frontend.client_answer import FACT_HEADERS, facts_of
from gpupoold.wire.messages import AccessRules, KeyRecord
from gpupoold.wire.records import FirstToken
from tests.unit.frontend.asgi import Answer, request
from tests.unit.frontend.test_router import CHAT, Served

PAGE, OTHER = b"https://app.example:8443", b"https://evil.example"
ALLOW = "access-control-allow-origin"
BODY = b'{"model": "alpha"}'
# What the JavaScript packages of OpenAI and Anthropic and this server's own clients send.
SENT = (
    "authorization,content-type,x-api-key,anthropic-version,anthropic-beta,"
    "anthropic-dangerous-direct-browser-access,openai-organization,openai-project,"
    "x-stainless-lang,x-stainless-retry-count,x-stainless-timeout,x-request-id,x-gpupool-pace"
)


class Site(Served):
    """A server that needs keys or not, and gives pages access."""

    def __init__(self, *allowed: bytes, are_required: bool = False) -> None:
        super().__init__()
        self.key = make_key()
        record = KeyRecord(self.key.id, "page", self.key.digest)
        origins = tuple(one.decode() for one in allowed)
        self.callers.replace(AccessRules([record], are_required, allowed_origins=origins))

    async def ask_from(
        self, origin: bytes | None, method: str = "POST", path: str = CHAT, body: bytes = BODY,
        headers: tuple[tuple[bytes, bytes], ...] = (), *, with_key: bool = False,
    ) -> Answer:  # fmt: skip
        sent = [(b"host", b"localhost"), *headers]
        if origin is not None:
            sent.append((b"origin", origin))
        if with_key:
            sent.append((b"authorization", f"Bearer {self.key.text}".encode()))
        return await request(self.router, method, path, (body,), sent)

    async def preflight(self, origin: bytes, path: str = CHAT, method: bytes = b"POST") -> Answer:
        asked = (
            (b"access-control-request-method", method),
            (b"access-control-request-headers", SENT.encode()),
            (b"access-control-request-private-network", b"true"),
        )
        return await self.ask_from(origin, "OPTIONS", path, b"", asked)


async def test_is_off_by_default() -> None:
    site = Site()
    for origin in (PAGE, b"http://localhost:3000", None):
        answer = await site.ask_from(origin)
        assert not any(name.startswith("access-control") for name in answer.headers)
    refused = await site.preflight(PAGE)
    assert refused.status == 403
    assert "access.allowed_origins" in refused.json()["error"]["message"]


@pytest.mark.parametrize("are_required", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/models/", "/v1/responses/r1"])
async def test_preflight_needs_no_key(are_required: bool, path: str) -> None:
    answer = await Site(PAGE, are_required=are_required).preflight(PAGE, path)
    assert answer.status == 200
    assert answer.headers[ALLOW] == PAGE.decode()
    assert answer.headers["access-control-allow-headers"] == SENT
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert "Origin" in answer.headers["vary"]
    assert "access-control-allow-credentials" not in answer.headers


async def test_page_reads_answers_and_errors() -> None:
    site = Site(PAGE, are_required=True)
    calls: list[tuple[int, dict[str, Any]]] = [
        (200, {"with_key": True}),
        (401, {}),
        (400, {"with_key": True, "body": b"{"}),
        (404, {"with_key": True, "body": b'{"model": "none"}'}),
        (503, {"with_key": True, "body": b'{"model": "late"}'}),
        (405, {"with_key": True, "method": "PUT"}),
        (404, {"with_key": True, "path": "/v1/none"}),
        (415, {"with_key": True, "headers": ((b"content-encoding", b"br"),)}),
    ]
    for status, call in calls:
        answer = await site.ask_from(PAGE, **call)
        assert (answer.status, answer.headers[ALLOW]) == (status, PAGE.decode())
        assert {"x-request-id", "retry-after", *FACT_HEADERS} <= set(
            answer.headers["access-control-expose-headers"].split(", ")
        )
        assert answer.headers["vary"] == "Origin"


async def test_page_needs_no_key_where_none_is_needed_but_the_right_host() -> None:
    site = Site(PAGE)
    assert (await site.ask_from(PAGE)).status == 200
    rebound = [(b"host", b"evil.example"), (b"origin", PAGE)]
    assert (await request(site.router, "POST", CHAT, (BODY,), rebound)).status == 421


@pytest.mark.parametrize(
    "origin", [OTHER, b"http://app.example:8443", b"https://app.example", b"null", PAGE + b"/"]
)
async def test_other_origins_are_refused(origin: bytes) -> None:
    site = Site(PAGE)
    answer = await site.ask_from(origin)
    assert (answer.status, answer.headers.get(ALLOW)) == (403, None)
    assert answer.headers["vary"] == "Origin"
    assert (await site.preflight(origin)).status == 403
    with_key = await site.ask_from(origin, with_key=True)
    assert (with_key.status, with_key.headers.get(ALLOW)) == (200, None)


async def test_any_origin() -> None:
    site = Site(b"*", are_required=True)
    assert (await site.preflight(OTHER)).headers[ALLOW] == "*"
    assert (await site.ask_from(OTHER)).status == 401
    answer = await site.ask_from(OTHER, with_key=True)
    assert (answer.status, answer.headers[ALLOW]) == (200, "*")


async def test_answers_without_an_origin_vary_too() -> None:
    """Else a cache could give a page the answer that has no headers."""
    answer = await Site(PAGE).ask_from(None, "GET", "/v1/models", b"")
    assert (answer.status, answer.headers["vary"]) == (200, "Origin")


def test_all_facts_are_exposed() -> None:
    facts = facts_of(FirstToken("r", 0, 0.0, 0.0, 0.0, 0.0)).keys() | {"cached-tokens"}
    assert {f"x-gpupool-{name}" for name in facts} == set(FACT_HEADERS)
