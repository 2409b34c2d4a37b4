"""``GET /metrics``, on the admin socket and for the frontends, whose port has it too."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import Response

from gpupoold.control.control_plane import Pool
from gpupoold.metrics.exposition import CONTENT_TYPE, Exporter


def add_metrics_routes(app: FastAPI, pool: Pool) -> None:
    """Serve the pool's metrics here, and to the frontends when they ask for them."""
    exporter = Exporter(pool)
    pool.frontends.metrics = exporter.text

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await exporter.text(), media_type=CONTENT_TYPE)
