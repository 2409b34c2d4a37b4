"""What the fake daemon shows: its state, history, logs, and the picture for ``top``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic_core import to_json

from gpupoold.api.schemas import (
    BatchInfo,
    CancelledRequest,
    ConfigInfo,
    DiffInfo,
    DiffRequest,
    LogLine,
    MachineInfo,
    OperateRequest,
    Ps,
    ReloadInfo,
    Status,
    Top,
    TurnInfo,
    Unloaded,
    UsageInfo,
)
from gpupoold.api.schemas_explain import ModelSpan, SpanInfo, Why
from gpupoold.domain import Event, RequestRecord, Switch
from gpupoold.errors import Failed, NoSuchModel, NoSuchRequest, Refused
from tests.unit.gpupool_cli import samples

if TYPE_CHECKING:
    from tests.unit.gpupool_cli.fake_daemon import FakeDaemon

POLL_S = 0.01
NDJSON = "application/x-ndjson"


def add_view_routes(app: FastAPI, daemon: FakeDaemon) -> None:
    """Everything that only looks, and what ``top`` does."""
    _add_state_routes(app, daemon)
    _add_config_routes(app, daemon)
    _add_top_routes(app, daemon)


def line_of(body: object) -> str:
    """A line of a streamed answer."""
    return to_json(body).decode() + "\n"


def _add_top_routes(app: FastAPI, daemon: FakeDaemon) -> None:
    @app.get("/top")
    async def top(
        turns_after: int = 0,
        events_after: int = 0,
        turns: int = 1000,
        events: int = 100,
        requests: int = 500,
        minutes: bool = True,
    ) -> Top:
        await asyncio.sleep(daemon.delay_s)
        now = daemon.ps()
        return Top(
            at=samples.AT,
            status=samples.status(daemon.http_url, len(daemon.models), daemon.state).model_copy(
                update={"pid": daemon.pid}
            ),
            devices=now.devices,
            models=[
                samples.top_model(
                    row, daemon.find(row.name), is_pinned=daemon.snapshot(row.name).is_pinned
                )
                for row in now.models
            ],
            requests=daemon.live_requests[:requests],
            turns=[turn for turn in daemon.turns if turn.id > turns_after][-turns:],
            last_turn_id=len(daemon.turns),
            events=[event for event in daemon.events if event.id > events_after][-events:],
            last_event_id=len(daemon.events),
            num_switches=now.num_switches,
            switched_bytes=now.switched_bytes,
        )

    @app.get("/turns")
    async def turns(after: int, limit: int) -> list[TurnInfo]:
        return [turn for turn in daemon.turns if turn.id > after][-limit:]

    @app.delete("/requests/{request_id:path}")
    async def cancel(request_id: str) -> CancelledRequest:
        for request in daemon.live_requests:
            if request.request_id == request_id:
                daemon.live_requests.remove(request)
                return CancelledRequest(
                    request_id=request_id,
                    model=request.model,
                    num_output_tokens=request.num_output_tokens,
                )
        raise NoSuchRequest(
            f"no live request has the id {request_id!r}", "the request may have ended"
        )

    @app.delete("/loaded/{name:path}")
    async def unload(name: str, mode: str = "refuse", keep_host: bool = False) -> Unloaded:
        model = daemon.find(name)
        if daemon.live.get(model.name, 0) and mode == "refuse":
            raise Refused(f"{model.name} has live requests", "use --drain or --force")
        daemon.unloads.append((model.name, mode, keep_host))
        host_bytes = 0 if keep_host else model.weight_bytes
        return Unloaded(name=model.name, device_bytes=model.weight_bytes, host_bytes=host_bytes)


def _add_state_routes(app: FastAPI, daemon: FakeDaemon) -> None:
    @app.get("/status", response_model=None)
    async def status() -> Response | Status:
        await asyncio.sleep(daemon.delay_s)
        if daemon.raw_answer is not None:
            return daemon.raw_answer
        return samples.status(daemon.http_url, len(daemon.models), daemon.state)

    @app.get("/ps")
    async def ps() -> Ps:
        return daemon.ps()

    @app.post("/check")
    async def check() -> list[dict[str, int]]:
        return []

    @app.get("/event-log")
    async def event_log() -> Response:
        return Response(b"".join(daemon.event_log), media_type=NDJSON)

    @app.get("/switches")
    async def switches(request: Request, limit: int) -> list[Switch]:
        daemon.queries.append(dict(request.query_params))
        return daemon.switches[:limit]

    @app.get("/history")
    async def history(request: Request) -> list[SpanInfo]:
        daemon.queries.append(dict(request.query_params))
        return daemon.spans

    @app.get("/history/models")
    async def history_by_model(request: Request) -> list[ModelSpan]:
        daemon.queries.append(dict(request.query_params))
        return daemon.model_spans

    @app.get("/usage")
    async def usage(request: Request) -> UsageInfo:
        daemon.queries.append(dict(request.query_params))
        return daemon.usage

    @app.get("/batches")
    async def batches(request: Request) -> list[BatchInfo]:
        daemon.queries.append(dict(request.query_params))
        return daemon.batches

    @app.get("/history/requests")
    async def past_requests(request: Request) -> list[RequestRecord]:
        daemon.queries.append(dict(request.query_params))
        return daemon.history

    @app.get("/why/{name:path}")
    async def why(name: str) -> Why:
        if name not in daemon.whys:
            raise NoSuchModel(
                f"neither a model nor a request is named {name!r}", "see `gpupool list`"
            )
        return daemon.whys[name]

    @app.get("/requests")
    async def requests(limit: int) -> Response:
        lines = [line_of(record) for record in daemon.history[:limit]]
        return StreamingResponse(iter(lines), media_type=NDJSON)

    @app.get("/events", response_model=None)
    async def events(
        after: int | None = None, limit: int = 100, follow: bool = False
    ) -> Response | list[Event]:
        if follow:
            return StreamingResponse(_following(daemon, after or 0), media_type=NDJSON)
        if after is None:
            return daemon.events[-limit:]
        return [event for event in daemon.events if event.id > after][:limit]

    @app.get("/logs")
    async def logs(lines: int, process: str | None = None, follow: bool = False) -> Response:
        if process == "nobody":
            raise Failed("no process 'nobody'", "see `gpupool ps`")
        return StreamingResponse(_logging(daemon, lines, follow), media_type=NDJSON)

    @app.post("/devices/{number}/operations")
    async def operate(number: int, body: OperateRequest) -> dict[str, Any]:
        return {"number": number, **body.model_dump()}


def _add_config_routes(app: FastAPI, daemon: FakeDaemon) -> None:
    @app.get("/config")
    async def config() -> ConfigInfo:
        return daemon.config

    @app.get("/machine")
    async def machine() -> MachineInfo:
        return daemon.machine

    @app.post("/config/diff")
    async def diff(body: DiffRequest) -> DiffInfo:
        daemon.requests.append(body)
        return DiffInfo(path=body.name or daemon.config.path, changes=daemon.changes)

    @app.post("/reload")
    async def reload() -> ReloadInfo:
        changed = [one for one in daemon.changes if one.effect != "restart"]
        waiting = [one for one in daemon.changes if one.effect == "restart"]
        return ReloadInfo(path=daemon.config.path, changed=changed, waiting=waiting)


async def _following(daemon: FakeDaemon, after: int) -> AsyncIterator[str]:
    while True:
        for event in list(daemon.events):
            if event.id > after:
                after = event.id
                yield line_of(event)
        await asyncio.sleep(POLL_S)


async def _logging(daemon: FakeDaemon, lines: int, follow: bool) -> AsyncIterator[str]:
    sent = max(len(daemon.log_lines) - lines, 0)
    while True:
        for text in daemon.log_lines[sent:]:
            yield line_of(LogLine(process="gpupoold", line=text))
        sent = len(daemon.log_lines)
        if not follow:
            return
        await asyncio.sleep(POLL_S)
