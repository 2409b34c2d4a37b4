"""``GET /metrics`` on the admin socket, and for frontends that serve the same text."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import Response

from gpupoold.control.control_plane import Pool
from gpupoold.metrics.exposition import CONTENT_TYPE, Exporter


def add_metrics_routes(app: FastAPI, pool: Pool) -> None:
    """Add the route, and answer the frontends' requests for metrics."""
    exporter = Exporter(pool)
    pool.frontends.metrics = exporter.text

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await exporter.text(), media_type=CONTENT_TYPE)
