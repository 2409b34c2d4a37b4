"""Every path x method x kind of key x host, with the answer that is expected of the router."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from gpupoold.access.secret import make_key
from gpupoold.frontend import router
from gpupoold.frontend.callers import Caller
from gpupoold.frontend.errors import send_json
from gpupoold.wire.messages import AccessRules, KeyRecord
from tests.unit.frontend.asgi import request
from tests.unit.frontend.test_router import Served

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")

# What a caller who may do everything is answered. Another method of a path that has one gets 405.
ANSWERS: dict[str, dict[str, int]] = {
    **{path: {"POST": 200} for path in router.ROUTED_PATHS},
    "/health": {"GET": 200, "HEAD": 200},
    "/ready": {"GET": 200, "HEAD": 200},
    "/version": {"GET": 200, "HEAD": 200},
    "/v1/models": {"GET": 200, "HEAD": 200},
    "/v1/models/": {"GET": 200, "HEAD": 200},
    "/v1/completions/": {"POST": 200},
    "/v1/models/alpha": {"GET": 200, "HEAD": 200},
    "/v1/models/beta": {"GET": 200, "HEAD": 200},
    "/v1/responses/": {"POST": 200},
    "/v1/responses/r-alpha": {"GET": 200},
    "/v1/responses/r-alpha/cancel": {"POST": 200},
    "/v1/responses/r-beta": {"GET": 200},
    "/metrics": {"GET": 200, "HEAD": 200},
    "/v1/files": {"GET": 200, "POST": 200},
    "/v1/files/file-1": {"GET": 200, "DELETE": 200},
    "/v1/files/file-1/content": {"GET": 200},
    "/v1/files/file-1/contents": {},
    "/v1/batches": {"GET": 200, "POST": 200},
    "/v1/batches/batch-1": {"GET": 200},
    "/v1/batches/batch-1/cancel": {"POST": 200},
    "/v1/filesystem": {},
    "/openapi.json": {"GET": 200, "HEAD": 200},
    "/": {"GET": 200, "HEAD": 200},
    "/docs": {},
    "/sleep": {},
    "/v1/load_lora_adapter": {},
    "/v1/models/../../metrics": {"GET": 404, "HEAD": 404},
    "//metrics": {},
    "/v1/models//": {"GET": 404, "HEAD": 404},
}
OPEN = ("/health", "/ready")

# None: a request without a key. The second tells whether the key is let in where one is needed.
KINDS = ("none", "all", "alpha", "metrics", "wrong", "expired", "revoked")
VALID = ("all", "alpha", "metrics")

OURS = [None, b"localhost", b"localhost:8000", b"LOCALHOST", b"127.0.0.1:8000", b"[::1]:8000"]
OURS += [b"127.8.8.8", b"a.localhost:1", b"[::ffff:127.0.0.1]", b"named.example", b"localhost."]
FOREIGN = [b"evil.example", b"evil.example:8000", b"0.0.0.0:8000", b"10.1.2.3", b"", b"[::1"]
FOREIGN += [b"localhost.evil.example", b"named.example.evil", b"127.0.0.1.evil.example"]


class Batches:
    """Files and batches, which answer every method."""

    async def serve(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        assert not any(name == b"authorization" for name, _ in scope["headers"])
        await send_json(send, 200, {})


class Box(Served):
    """The router's models with keys of every kind; ``named.example`` is a name of the server."""

    def __init__(self, *, are_required: bool) -> None:
        super().__init__()
        services = dataclasses.replace(self.router.services, batches=Batches())  # type: ignore[arg-type]
        self.router.services = services
        self.keys = {kind: make_key() for kind in KINDS if kind != "none"}
        self.apis["alpha"].responses.add("r-alpha")
        self.apis["beta"].responses.add("r-beta")
        records = [self._record("all"), self._record("alpha", models=("alpha",))]
        records += [self._record("metrics", models=()), self._record("expired", expires_at=1.0)]
        self.callers.replace(AccessRules(records, are_required, ("named.example",)))

    def _record(self, kind: str, **more: Any) -> KeyRecord:
        key = self.keys[kind]
        return dataclasses.replace(KeyRecord(key.id, kind, key.digest), **more)

    async def status_of(self, kind: str, method: str, path: str, **headers: bytes | None) -> int:
        sent = [(name.encode(), value) for name, value in headers.items() if value is not None]
        if kind == "wrong":
            sent.append((b"authorization", b"Bearer gpk_00000000_" + b"0" * 24))
        elif kind != "none":
            sent.append((b"authorization", f"Bearer {self.keys[kind].text}".encode()))
        answer = await request(self.router, method, path, (b'{"model": "alpha"}',), sent)
        return answer.status


def expected(are_required: bool, kind: str, method: str, path: str, *, is_ours: bool) -> int:
    """The status by the rules of docs/security.md, written a second time."""
    permitted = ANSWERS[path].get(method, 405 if ANSWERS[path] else 404)
    if method == "OPTIONS" and ANSWERS[path]:
        return 204  # the methods of a path are no secret, and a preflight has no key
    if path in OPEN:
        return permitted
    if kind not in VALID and (kind != "none" or are_required):
        return 401
    if kind == "none" and not is_ours:
        return 421
    if path == "/metrics" and kind == "alpha":
        return 403  # whatever the method
    is_of_beta = path in ("/v1/models/beta", "/v1/responses/r-beta")
    asks_a_model = path.removesuffix("/") in router.ROUTED_PATHS or "alpha" in path
    if permitted == 200 and (
        (kind == "alpha" and is_of_beta) or (kind == "metrics" and (is_of_beta or asks_a_model))
    ):
        return 404
    return permitted


def test_the_table_has_every_path_of_the_router() -> None:
    paths = set(re.findall(r'"(/(?:[a-z0-9_.][a-z0-9_/.]*)?)"', inspect.getsource(router)))
    paths |= set(router._FIXED)
    assert paths <= set(ANSWERS)
    assert len(paths) > 12


@pytest.mark.parametrize("path", sorted(path for path, methods in ANSWERS.items() if methods))
async def test_other_methods_name_those_that_are_allowed(path: str) -> None:
    box = Box(are_required=False)
    allowed = ", ".join(sorted((*ANSWERS[path], "OPTIONS")))
    for method, status in (("BREW", 405), ("OPTIONS", 204)):
        answer = await request(box.router, method, path)
        assert (answer.status, answer.headers["allow"]) == (status, allowed)


@pytest.mark.parametrize("are_required", [False, True])
@pytest.mark.parametrize("host", [*OURS, *FOREIGN])
async def test_matrix(are_required: bool, host: bytes | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(router, "describe", lambda *_, **__: {})
    box = Box(are_required=are_required)
    wrong = {}
    for kind, method, path in itertools.product(KINDS, METHODS, ANSWERS):
        found = await box.status_of(kind, method, path, host=host)
        due = expected(are_required, kind, method, path, is_ours=host in OURS)
        if found != due:
            wrong[kind, method, path] = (found, due)
    assert not wrong


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        (b"http://localhost:3000", 200),
        (b"https://127.0.0.1", 200),
        (b"http://named.example", 200),
        (b"vscode-webview://abc", 200),
        (b"http://evil.example", 403),
        (b"https://localhost.evil.example:8000", 403),
        (b"null", 403),
        (b"", 403),
        (b"evil.example", 403),
        (b"http://", 403),
        (b"http://[", 403),
    ],
)
async def test_origins(origin: bytes | None, status: int) -> None:
    box = Box(are_required=False)
    assert await box.status_of("none", "POST", "/v1/completions", origin=origin) == status
    # A page that has been given a key may use it, from wherever it comes.
    assert await box.status_of("all", "POST", "/v1/completions", origin=origin) == 200


async def test_a_unix_socket_has_no_host() -> None:
    box = Box(are_required=False)
    statuses = []

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "GET", "path": "/version", "server": ("/run/x.sock", None)}
    await box.router({**scope, "headers": [(b"host", b"llm.example")]}, receive, send)
    assert statuses[0] == 200
