"""The admin API: FastAPI on a unix socket, with one thin handler per route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gpupool_state import RequestRow
from gpupoold import __version__
from gpupoold.admin.log_reader import follow_logs
from gpupoold.admin.routes_access import add_access_routes
from gpupoold.admin.routes_batches import add_batch_routes
from gpupoold.admin.routes_config import add_config_routes
from gpupoold.admin.routes_explain import add_explain_routes
from gpupoold.admin.routes_fleet import add_fleet_routes
from gpupoold.admin.routes_machine import add_machine_routes
from gpupoold.admin.routes_metrics import add_metrics_routes
from gpupoold.admin.routes_top import add_top_routes
from gpupoold.api.schemas import (
    DeviceInfo,
    ErrorBody,
    EventInfo,
    Ps,
    SetDeviceRequest,
    SetHostingRequest,
    Status,
)
from gpupoold.api.schemas_bench import BenchMemoryRequest, BenchSwitchRequest
from gpupoold.api.schemas_cache import CachedModel, CacheInfo, SetCachedRequest
from gpupoold.api.schemas_models import (
    AddAdapterRequest,
    AddModelRequest,
    AddPresetRequest,
    ModelInfo,
    Progress,
    SetModelRequest,
)
from gpupoold.control.control_plane import ControlPlane
from gpupoold.control.models.cache_control import CacheControl
from gpupoold.control.models.info import model_info
from gpupoold.control.views import bodies as views
from gpupoold.domain import Role
from gpupoold.errors import GpupoolError, UsageError
from gpupoold.metrics.exposition import Exporter
from gpupoold.printable import plain_problem

_NDJSON = "application/x-ndjson"
_FOLLOW_WAIT_S = 10.0
_LINES_AT_ONCE = 200

Limit = Annotated[int, Query(gt=0, le=10_000)]


def build_app(control_plane: ControlPlane, exporter: Exporter) -> FastAPI:
    """Return the application of the admin API for ``control_plane``."""
    app = FastAPI(title="gpupoold", version=__version__, docs_url=None, redoc_url=None)
    app.add_exception_handler(GpupoolError, _on_error)
    app.add_exception_handler(UnicodeEncodeError, _on_surrogate)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    _add_model_routes(app, control_plane)
    _add_cache_routes(app, control_plane.cache_control)
    _add_device_routes(app, control_plane)
    _add_view_routes(app, control_plane)
    add_access_routes(app, control_plane)
    add_batch_routes(app, control_plane)
    add_config_routes(app, control_plane)
    add_machine_routes(app, control_plane)
    add_metrics_routes(app, exporter)
    add_explain_routes(app, control_plane)
    add_fleet_routes(app, control_plane)
    add_top_routes(app, control_plane)
    return app


def _add_model_routes(app: FastAPI, control_plane: ControlPlane) -> None:
    @app.get("/models")
    async def list_models() -> list[ModelInfo]:
        return await control_plane.models()

    @app.post("/models")
    async def add_model(body: AddModelRequest) -> StreamingResponse:
        steps = control_plane.lifecycle.add(body)
        return StreamingResponse(_progress_lines(steps), media_type=_NDJSON)

    @app.post("/adapters")
    async def add_adapter(body: AddAdapterRequest) -> StreamingResponse:
        steps = control_plane.lifecycle.add_adapter(body)
        return StreamingResponse(_progress_lines(steps), media_type=_NDJSON)

    @app.post("/presets")
    async def add_preset(body: AddPresetRequest) -> ModelInfo:
        return model_info(await control_plane.lifecycle.presets.add(body))

    @app.get("/models/{name:path}")
    async def show_model(name: str) -> ModelInfo:
        return await control_plane.model(name)

    @app.patch("/models/{name:path}")
    async def set_model(name: str, body: SetModelRequest) -> ModelInfo:
        row = await control_plane.lifecycle.set(name, body)
        return model_info(row, control_plane.fleet.availability(row.spec.name).state)

    @app.delete("/models/{name:path}")
    async def remove_model(
        name: str, mode: Literal["refuse", "drain", "force"] = "refuse"
    ) -> ModelInfo:
        return model_info(await control_plane.lifecycle.remove(name, mode))

    @app.put("/hosting/{name:path}")
    async def set_hosting(name: str, body: SetHostingRequest) -> ModelInfo:
        row = await control_plane.lifecycle.placement.place(name, body.devices)
        return model_info(row, control_plane.fleet.availability(row.spec.name).state)

    @app.post("/bench/switch")
    async def bench_switch(body: BenchSwitchRequest) -> dict[str, Any]:
        return await control_plane.bench_switch(body)

    @app.post("/bench/memory")
    async def bench_memory(body: BenchMemoryRequest) -> dict[str, Any]:
        return await control_plane.bench_memory(body)

    @app.post("/check")
    async def check() -> list[object]:
        return await control_plane.check_integrity()

    # /stimuli is the earlier name of /event-log, answered for one release.
    @app.get("/stimuli", deprecated=True)
    @app.get("/event-log")
    async def event_log() -> StreamingResponse:
        return StreamingResponse(_chunks(control_plane.event_log()), media_type=_NDJSON)


def _add_cache_routes(app: FastAPI, cache: CacheControl) -> None:
    @app.get("/cache")
    async def cache_info() -> CacheInfo:
        return await cache.info()

    @app.patch("/cache/{name:path}")
    async def set_cached(name: str, body: SetCachedRequest) -> CachedModel:
        return await cache.set_pinned(name, body.is_pinned)

    @app.post("/cache/{name:path}")
    async def warm(name: str) -> CachedModel:
        return await cache.warm(name)

    @app.delete("/cache/{name:path}")
    async def drop(name: str) -> CachedModel:
        return await cache.drop(name)


def _add_device_routes(app: FastAPI, control_plane: ControlPlane) -> None:
    # /instances is the earlier name of /devices, kept for one release.
    @app.patch("/instances/{number}", deprecated=True)
    @app.patch("/devices/{number}")
    async def set_device(number: int, body: SetDeviceRequest) -> DeviceInfo:
        control_plane.workers.set_role(number, None if body.role == "auto" else Role(body.role))
        return control_plane.devices()[number]

    @app.post("/instances/{number}/drain", deprecated=True)
    @app.post("/devices/{number}/drain")
    async def drain(number: int) -> DeviceInfo:
        await control_plane.workers.drain(number)
        return control_plane.devices()[number]

    @app.post("/devices/{number}/park")
    async def park(number: int) -> DeviceInfo:
        await control_plane.lifecycle.parking.park(number)
        return control_plane.devices()[number]

    @app.delete("/devices/{number}/park")
    async def wake(number: int) -> DeviceInfo:
        control_plane.lifecycle.parking.wake(number)
        return control_plane.devices()[number]

    @app.delete("/instances/{number}/drain", deprecated=True)
    @app.delete("/devices/{number}/drain")
    async def undrain(number: int) -> DeviceInfo:
        control_plane.workers.undrain(number)
        return control_plane.devices()[number]


def _add_view_routes(app: FastAPI, control_plane: ControlPlane) -> None:
    @app.get("/status")
    async def status() -> Status:
        return await control_plane.status()

    @app.get("/ps", response_model=Ps)
    async def ps() -> Response:
        return Response(await control_plane.ps(), media_type="application/json")

    @app.get("/requests")
    async def requests(limit: Limit = 10_000) -> StreamingResponse:
        await control_plane.history.flush()
        rows = await control_plane.history.recent_requests(limit=limit)
        return StreamingResponse(_request_lines(rows), media_type=_NDJSON)

    @app.get("/events", response_model=None)
    async def events(
        after: int | None = None, limit: Limit = 100, follow: bool = False
    ) -> list[EventInfo] | StreamingResponse:
        first = after if after is not None else max(0, control_plane.history.last_event_id - limit)
        if follow:
            return StreamingResponse(_event_lines(control_plane, first), media_type=_NDJSON)
        return [
            views.event_info(row) for row in await control_plane.history.events_after(first, limit)
        ]

    @app.get("/logs")
    async def logs(
        request: Request,
        lines: Annotated[int, Query(ge=0, le=100_000)] = 100,
        process: str | None = None,
        follow: bool = False,
    ) -> StreamingResponse:
        paths = _log_paths(control_plane.settings.paths.log_dir, process)
        stream = follow_logs(paths, lines, follow=follow, is_gone=request.is_disconnected)
        return StreamingResponse(stream, media_type=_NDJSON)


async def _progress_lines(steps: AsyncIterator[Progress]) -> AsyncIterator[str]:
    try:
        async for line in steps:
            yield line.model_dump_json() + "\n"
    except GpupoolError as error:
        yield Progress(stage="failed", error=_body(error)).model_dump_json() + "\n"


def _chunks(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Yield a few lines at a time, because the server takes each chunk from a thread."""
    while chunk := b"".join(islice(lines, _LINES_AT_ONCE)):
        yield chunk


async def _request_lines(rows: Sequence[RequestRow]) -> AsyncIterator[str]:
    """Yield a few lines at a time, because a long answer would delay tokens on the event loop."""
    for start in range(0, len(rows), _LINES_AT_ONCE):
        chunk = rows[start : start + _LINES_AT_ONCE]
        yield "".join(views.request_record(row).model_dump_json() + "\n" for row in chunk)
        await asyncio.sleep(0)


async def _event_lines(control_plane: ControlPlane, after_id: int) -> AsyncIterator[str]:
    while not control_plane.stopping:
        for row in await control_plane.history.events_after(after_id, 1000):
            after_id = row.id
            yield views.event_info(row).model_dump_json() + "\n"
        await control_plane.history.wait_event(after_id, _FOLLOW_WAIT_S)
        await asyncio.sleep(0)


def _log_paths(log_dir: Path, process: str | None) -> dict[str, Path]:
    paths = {path.stem: path for path in sorted(log_dir.glob("*.log"))}
    if process is None:
        return paths
    if process not in paths:
        raise UsageError(f"no process is named {process!r}", f"there are: {', '.join(paths)}")
    return {process: paths[process]}


def _body(error: GpupoolError) -> ErrorBody:
    message = error.message.encode(errors="replace").decode()  # may quote a surrogate
    return ErrorBody(code=error.code, message=message, hint=error.hint)


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GpupoolError)
    return JSONResponse({"error": _body(error).model_dump()}, status_code=error.http_status)


async def _on_surrogate(request: Request, _: Exception) -> JSONResponse:
    return await _on_error(request, UsageError("a text has half of a surrogate pair"))


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = [
        f"{'.'.join(map(str, p['loc'][1:]))}: {plain_problem(p['msg'])}" for p in error.errors()
    ]
    return await _on_error(request, UsageError("; ".join(problems)))
