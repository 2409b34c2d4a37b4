"""``GET /metrics`` on the admin socket."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import Response

from gpupoold.metrics.exposition import CONTENT_TYPE, Exporter


def add_metrics_routes(app: FastAPI, exporter: Exporter) -> None:
    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await exporter.text(), media_type=CONTENT_TYPE)
