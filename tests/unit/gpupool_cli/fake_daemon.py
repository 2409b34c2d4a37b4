"""The admin API and a streaming chat endpoint in memory, on real sockets.

Small, but no mock: requests are parsed and answered by FastAPI and uvicorn, so
clients under test meet real connections, streams and disconnects.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from gpupoold.api.schemas import (
    AdditionInfo,
    BatchInfo,
    CachedModel,
    CacheInfo,
    ChangeInfo,
    DeviceInfo,
    ErrorBody,
    Ps,
    RequestInfo,
    SetCachedRequest,
    SetDeviceRequest,
    SetHostingRequest,
    TurnInfo,
    UsageInfo,
)
from gpupoold.api.schemas_explain import ModelSpan, SpanInfo, Why
from gpupoold.api.schemas_models import AddModelRequest, ModelInfo, Progress, SetModelRequest
from gpupoold.domain import Event, RequestRecord, Switch
from gpupoold.errors import (
    GpupoolError,
    NoSuchModel,
    Refused,
    TimedOut,
    Unavailable,
    UsageError,
    no_such_device,
)
from tests.support.quick_server import QuickServer
from tests.unit.gpupool_cli import samples
from tests.unit.gpupool_cli.fake_views import NDJSON, POLL_S, add_view_routes, line_of

_WEIGHT_BYTES = 15 * 1024**3


class ServerThread:
    """uvicorn in a thread, on a unix socket or on a free TCP port; a context manager."""

    def __init__(self, app: ASGIApp, uds: Path | None = None) -> None:
        config = uvicorn.Config(
            app,
            uds=None if uds is None else str(uds),
            host="127.0.0.1",
            port=0,
            log_level="error",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = QuickServer(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    @property
    def port(self) -> int:
        """The TCP port listened on."""
        port: int = self._server.servers[0].sockets[0].getsockname()[1]
        return port

    def __enter__(self) -> Self:
        self.start()
        self.wait_started()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()
        self._thread.join(10)

    def start(self) -> None:
        """Start without a wait for the listening sockets."""
        self._thread.start()

    def wait_started(self) -> None:
        give_up_at = time.monotonic() + 10
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > give_up_at:
                raise RuntimeError("the server did not start")
            time.sleep(POLL_S)

    def end(self) -> None:
        """End soon; leaving the context waits."""
        self._server.should_exit = True


class FakeDaemon:
    """What the tests look at and turn knobs on.

    ``live`` counts live requests per model, ``cached`` and ``device`` are changes to the samples
    of snapshots and of the device, ``delay_s`` holds back the answers to ``GET /status`` and
    ``GET /models``, ``raw_answer`` replaces the first of them. ``chat_chunks`` are the
    server-sent data of the next chat, ``chat_status`` is its HTTP status. ``queries`` are those
    of what was asked of the past.
    """

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.models: dict[str, ModelInfo] = {}
        self.live: dict[str, int] = {}
        self.cached: dict[str, dict[str, Any]] = {}
        self.events: list[Event] = []
        self.log_lines: list[str] = ["one", "two", "three"]
        self.event_log: list[bytes] = []
        self.switches: list[Switch] = []
        self.history: list[RequestRecord] = []
        self.spans: list[SpanInfo] = []
        self.model_spans: list[ModelSpan] = []
        self.batches: list[BatchInfo] = []
        self.usage = UsageInfo(since=1_700_000_000.0, uses=[], devices=[])
        self.whys: dict[str, Why] = {}
        self.queries: list[dict[str, str]] = []
        self.turns: list[TurnInfo] = []
        self.live_requests: list[RequestInfo] = []
        self.additions: list[AdditionInfo] = []
        self.unloads: list[tuple[str, str, bool]] = []
        self.delay_s = 0.0
        self.download_pause_s = 0.0
        self.state: Any = "ready"
        self.raw_answer: Response | None = None
        self.config = samples.config()
        self.machine = samples.machine()
        self.changes: list[ChangeInfo] = []
        self.device: dict[str, Any] = {}
        self.pid = 4321
        self.requests: list[BaseModel] = []
        self.chats: list[dict[str, Any]] = []
        self.chat_chunks: list[str] = samples.chat_chunks("Hello", ", wörld", "!")
        self.chat_status = 200
        self.chat_pause_s = 0.0
        admin, http = _apps()
        self._admin = ServerThread(_Serving(admin, self), socket_path)
        self._http = ServerThread(_Serving(http, self))

    def __enter__(self) -> Self:
        self._http.start()
        self._admin.start()
        self._http.wait_started()
        self._admin.wait_started()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.end()
        self._admin.__exit__(kind, error, traceback)
        self._http.__exit__(kind, error, traceback)

    def stop_admin(self) -> None:
        """Stop answering at the admin socket, as a daemon that was told to stop."""
        self._admin.__exit__(None, None, None)

    @property
    def http_url(self) -> str:
        """Where the chat endpoint listens."""
        return f"http://127.0.0.1:{self._http.port}"

    def add(self, name: str, **changes: Any) -> ModelInfo:
        """Register a model at once."""
        model = replace(samples.model(name), **changes)
        self.models[name] = model
        return model

    def snapshot(self, name: str, **changes: Any) -> CachedModel:
        """The snapshot of a model, with changes from now on."""
        model = self.find(name)
        changed = self.cached.setdefault(model.name, {})
        changed.update(changes)
        return samples.cached(model.name).model_copy(update=changed)

    def ps(self) -> Ps:
        """What runs."""
        ps = samples.ps(list(self.models.values()))
        devices = [ps.devices[0].model_copy(update=self.device)]
        return ps.model_copy(update={"devices": devices, "additions": self.additions})

    def change_device(self, number: int, **changes: Any) -> DeviceInfo:
        """The device, with changes from now on."""
        if number:
            raise no_such_device(number, 1)
        self.device.update(changes)
        return self.ps().devices[0]

    def tell(self, message: str, level: Any = "info") -> None:
        """Add an event."""
        event = samples.event(len(self.events) + 1, message)
        self.events.append(replace(event, level=level))

    def find(self, name: str) -> ModelInfo:
        """The model with this name, alias, preset or adapter."""
        for model in self.models.values():
            further = {one.name for one in model.presets} | {one.name for one in model.adapters}
            if name == model.name or name in model.aliases or name in further:
                return model
        raise NoSuchModel(f"no model {name!r}", "see `gpupool list`")


_serving: ContextVar[FakeDaemon] = ContextVar("serving")


class _Current:
    """The daemon that is asked."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_serving.get(), name)


class _Serving:
    """An application that knows the daemon that is asked."""

    def __init__(self, app: FastAPI, daemon: FakeDaemon) -> None:
        self._app, self._daemon = app, daemon

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _serving.set(self._daemon)
        await self._app(scope, receive, send)


@cache
def _apps() -> tuple[FastAPI, FastAPI]:
    """The applications of all daemons: 60 ms of a core are in their routes."""
    current = cast("FakeDaemon", _Current())
    return _admin_app(current), _http_app(current)


def _admin_app(daemon: FakeDaemon) -> FastAPI:
    """The admin contract over ``daemon``'s memory."""
    app = FastAPI()
    app.add_exception_handler(GpupoolError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    _add_model_routes(app, daemon)
    _add_cache_routes(app, daemon)
    _add_device_routes(app, daemon)
    add_view_routes(app, daemon)
    return app


def _http_app(daemon: FakeDaemon) -> FastAPI:
    """An OpenAI-like chat endpoint that streams ``daemon.chat_chunks``."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        daemon.chats.append(await request.json())
        if daemon.chat_status != 200:
            error = {"message": "the model is busy", "code": daemon.chat_status}
            return JSONResponse({"error": error}, daemon.chat_status)
        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def chunks() -> AsyncIterator[str]:
        for chunk in daemon.chat_chunks:
            yield f"data: {chunk}\n\n"
            await asyncio.sleep(daemon.chat_pause_s)

    return app


async def _on_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GpupoolError)
    body = ErrorBody(code=error.code, message=error.message, hint=error.hint)
    headers = {"Retry-After": "7"} if isinstance(error, Unavailable) else None
    return JSONResponse({"error": body.model_dump()}, error.http_status, headers)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    return await _on_error(request, UsageError(str(error)))


def _add_model_routes(app: FastAPI, daemon: FakeDaemon) -> None:
    @app.get("/models")
    async def models() -> list[ModelInfo]:
        await asyncio.sleep(daemon.delay_s)
        return list(daemon.models.values())

    @app.get("/models/{name:path}")
    async def model(name: str) -> ModelInfo:
        return daemon.find(name)

    @app.put("/hosting/{name:path}")
    async def set_hosting(name: str, body: SetHostingRequest) -> ModelInfo:
        model = daemon.find(name)
        if any(number > 1 for number in body.devices):
            raise no_such_device(2, 2)
        return daemon.add(model.name, devices=tuple(body.devices))

    @app.post("/models")
    async def add_model(body: AddModelRequest) -> Response:
        daemon.requests.append(body)
        if body.name in daemon.models:
            raise Refused(f"model {body.name!r} exists", "remove it first, or `gpupool set`")
        return StreamingResponse(_adding(daemon, body), media_type=NDJSON)

    @app.patch("/models/{name:path}")
    async def set_model(name: str, body: SetModelRequest) -> ModelInfo:
        daemon.requests.append(body)
        model = daemon.find(name)
        kept = [alias for alias in model.aliases if alias not in body.remove_aliases]
        changes = body.model_dump(include={"ttft_s", "tbt_s"}, exclude_none=True)
        changes["aliases"] = (*kept, *body.add_aliases)
        daemon.models[model.name] = replace(model, **changes)
        return daemon.models[model.name]

    @app.delete("/models/{name:path}")
    async def remove_model(name: str, mode: str = "refuse") -> ModelInfo:
        model = daemon.find(name)
        while daemon.live.get(model.name, 0) and mode != "force":
            if mode == "refuse":
                raise Refused(f"model {model.name!r} has live requests", "use --drain or --force")
            await asyncio.sleep(POLL_S)
        if name != model.name and name not in model.aliases:
            presets = tuple(one for one in model.presets if one.name != name)
            adapters = tuple(one for one in model.adapters if one.name != name)
            return daemon.add(model.name, presets=presets, adapters=adapters)
        return daemon.models.pop(model.name)


def _add_cache_routes(app: FastAPI, daemon: FakeDaemon) -> None:
    @app.get("/cache")
    async def cache() -> CacheInfo:
        return samples.cache([daemon.snapshot(name) for name in daemon.models])

    @app.patch("/cache/{name:path}")
    async def set_cached(name: str, body: SetCachedRequest) -> CachedModel:
        return daemon.snapshot(name, is_pinned=body.is_pinned)

    @app.post("/cache/{name:path}")
    async def warm(name: str) -> CachedModel:
        return daemon.snapshot(name, state="host")

    @app.delete("/cache/{name:path}")
    async def drop(name: str) -> CachedModel:
        model = daemon.find(name)
        if daemon.live.get(model.name, 0):
            raise Refused(f"{model.name} has live requests", "wait until the requests have ended")
        return daemon.snapshot(name, state="disk")


def _add_device_routes(app: FastAPI, daemon: FakeDaemon) -> None:
    @app.patch("/devices/{number}")
    async def set_device(number: int, body: SetDeviceRequest) -> DeviceInfo:
        is_fixed = body.role != "auto"
        changes: dict[str, Any] = {"role": body.role} if is_fixed else {}
        return daemon.change_device(number, is_role_fixed=is_fixed, **changes)

    @app.post("/devices/{number}/drain")
    async def drain(number: int) -> DeviceInfo:
        answer = daemon.change_device(number, is_draining=True)
        if num_left := sum(daemon.live.values()):
            raise TimedOut(
                f"worker {number} still has {num_left} requests", "the requests continue there"
            )
        return answer

    @app.delete("/devices/{number}/drain")
    async def undrain(number: int) -> DeviceInfo:
        return daemon.change_device(number, is_draining=False)


async def _adding(daemon: FakeDaemon, body: AddModelRequest) -> AsyncIterator[str]:
    yield line_of(Progress(stage="resolve"))
    if body.source == "breaks-off":
        return
    if body.source == "cached/repo":
        yield line_of(Progress(stage="resolve", note="used in place: /cache/[bold]"))
    if body.source == "missing/repo":
        error = ErrorBody(code="failed", message="no such repository", hint="check --source")
        yield line_of(Progress(stage="resolve", error=error))
        return
    for done in range(0, _WEIGHT_BYTES + 1, _WEIGHT_BYTES // 3):
        step = Progress(stage="download", done_bytes=done, total_bytes=_WEIGHT_BYTES)
        yield line_of(step.model_copy(update={"bytes_per_s": float(1 << 26)}))
        await asyncio.sleep(daemon.download_pause_s)
    given = {"revision", "dtype", "max_model_len", "ttft_s", "tbt_s", "engine", "pace"}
    changes = body.model_dump(include=given)
    changes |= {"aliases": tuple(body.aliases), "devices": tuple(body.devices)}
    if body.detach:
        yield line_of(Progress(stage="check"))
        yield line_of(Progress(stage="detached"))
        return
    if body.check_only:
        yield line_of(Progress(stage="check", model=samples.model(body.name)))
        return
    for stage in ("check", "load"):
        yield line_of(Progress(stage=stage))
    model = daemon.add(body.name, source=body.source or body.name, **changes)
    yield line_of(Progress(stage="ready", model=model))
