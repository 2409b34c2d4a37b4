"""Routes for explanations, the history and its spans."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Literal

from fastapi import FastAPI, Query

from gpupoold.api.request_ids import request_id_of
from gpupoold.api.schemas import RequestRecord
from gpupoold.api.schemas_explain import ModelSpan, SpanInfo, Why
from gpupoold.api.schemas_usage import UsageInfo
from gpupoold.control.control_plane import ControlPlane
from gpupoold.control.views import bodies as views
from gpupoold.control.views.spans import ModelSums, Spans, span_s
from gpupoold.control.views.usage import usage_info
from gpupoold.domain import Switch
from gpupoold.errors import Failed

Since = Annotated[float, Query(gt=0, le=10 * 365 * 86400)]
# Age of the use of the GPUs that an answer may lack.
FRESH_S = 2.0
Limit = Annotated[int, Query(gt=0, le=10_000)]


def add_explain_routes(app: FastAPI, control_plane: ControlPlane) -> None:
    """Add the routes of explanations and the history; ``since_s`` is seconds before now."""

    @app.get("/why/{name:path}")
    async def why(name: str) -> Why:
        return await control_plane.explainer.why(name)

    @app.get("/history")
    async def history(model: str | None = None, since_s: Since = 3600.0) -> list[SpanInfo]:
        spans = Spans(span_s(since_s))
        await _add_minutes(spans, control_plane, model, since_s)
        return spans.infos()

    @app.get("/history/models")
    async def models(model: str | None = None, since_s: Since = 3600.0) -> list[ModelSpan]:
        sums = ModelSums(time.time() - since_s, since_s)
        await _add_minutes(sums, control_plane, model, since_s)
        return sums.infos()

    @app.get("/usage")
    async def usage(since_s: Since = 3600.0) -> UsageInfo:
        control_plane.dispatcher.accounts.usage.close(FRESH_S)
        history, since = control_plane.history, time.time() - since_s
        await history.flush()
        names = {row.id: row.name for row in await control_plane.keyring.list(with_revoked=True)}
        uses, devices = await history.usage(since), await history.device_sums(since)
        return usage_info(since, uses, devices, names)

    @app.get("/history/requests")
    async def requests(
        model: str | None = None,
        since_s: Since = 3600.0,
        limit: Limit = 100,
        request_id: str | None = None,
    ) -> list[RequestRecord]:
        await control_plane.history.flush()
        rows = await control_plane.history.recent_requests(
            await _name(control_plane, model),
            time.time() - since_s,
            limit,
            None if request_id is None else request_id_of(request_id),
        )
        return [views.request_record(row) for row in rows]

    @app.get("/switches")
    async def switches(
        limit: Limit = 20,
        model: str | None = None,
        device: Annotated[int | None, Query(ge=0)] = None,
        since_s: Since | None = None,
        order: Literal["latest", "slowest"] = "latest",
    ) -> list[Switch]:
        await control_plane.history.flush()
        return await control_plane.history.recent_switches(
            limit,
            model=await _name(control_plane, model),
            device=device,
            since=None if since_s is None else time.time() - since_s,
            order=order,
        )


async def _name(control_plane: ControlPlane, name: str | None) -> str | None:
    """Return the model's name for an alias; an unknown name may still have a history."""
    row = None if name is None else await control_plane.registry.get(name)
    is_counted = name is None or row is None or name not in (row.spec.name, *row.spec.aliases)
    return name if is_counted or row is None else row.spec.name


async def _add_minutes(
    sums: Spans | ModelSums, control_plane: ControlPlane, model: str | None, since_s: float
) -> None:
    """Add the minutes of the last ``since_s`` seconds, of one model or of all."""
    model = await _name(control_plane, model)
    await control_plane.history.flush()
    try:
        async for rows in control_plane.history.minutes(time.time() - since_s, model):
            # In a thread, because many rows would delay tokens.
            await asyncio.to_thread(sums.add, rows)
        sums.add(control_plane.minutes.under_way(model))
    except ValueError as error:
        raise Failed(
            f"a row of slo_minutes in the state database is damaged: {error}",
            "delete the rows of the table",
        ) from error
