"""The route that ``gpupool top`` polls every second, and the actions of its keys."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import FastAPI, Query
from fastapi.responses import Response

from gpupoold.admin import top_view
from gpupoold.api.schemas_top import CancelledRequest, Top, TurnInfo, Unloaded, UnloadMode
from gpupoold.control.control_plane import ControlPlane

Id = Annotated[int, Query(ge=0)]
Limit = Annotated[int, Query(gt=0, le=10_000)]
Count = Annotated[int, Query(ge=0, le=10_000)]


def add_top_routes(app: FastAPI, control_plane: ControlPlane) -> None:
    """Add the routes to the admin API."""

    @app.get("/turns", response_model=list[TurnInfo])
    async def turns(after: Id = 0, limit: Limit = 1000) -> Response:
        return _json(
            msgspec.json.encode(
                top_view.turns(control_plane.dispatcher.accounts.turns.after(after, limit))
            )
        )

    @app.get("/top", response_model=Top)
    async def top(
        turns_after: Id = 0,
        events_after: Id | None = None,
        turns: Count = 2000,
        events: Count = 100,
        requests: Count = 500,
        minutes: bool = True,
    ) -> Response:
        limits = top_view.TopLimits(turns_after, events_after, turns, events, requests, minutes)
        return _json(await top_view.top(control_plane, limits))

    @app.delete("/requests/{request_id:path}")
    async def cancel(request_id: str) -> CancelledRequest:
        ended = control_plane.dispatcher.cancel(request_id, "cancelled by the operator")
        for request in ended:
            control_plane.history.record_event(
                "info", "request_cancelled", request.model, f"{request.request_id}, by hand"
            )
        return CancelledRequest(
            request_id=ended[0].request_id,
            model=ended[0].model,
            num_output_tokens=sum(len(request.token_times_s) for request in ended),
            num_requests=len(ended),
        )

    @app.delete("/loaded/{name:path}")
    async def unload(name: str, mode: UnloadMode = "refuse", keep_host: bool = False) -> Unloaded:
        return await control_plane.unloader.unload(name, mode, keep_host=keep_host)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
