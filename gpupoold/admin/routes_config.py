"""The admin API's routes about the configuration."""

from __future__ import annotations

from fastapi import FastAPI

from gpupoold.api.schemas_config import ConfigInfo, DiffInfo, DiffRequest, ReloadInfo
from gpupoold.control.control_plane import Pool


def add_config_routes(app: FastAPI, pool: Pool) -> None:
    """Add the routes that show, compare and reload the configuration."""

    @app.get("/config")
    async def show_config() -> ConfigInfo:
        return pool.configuration.info()

    @app.post("/config/diff")
    async def diff_config(body: DiffRequest) -> DiffInfo:
        return await pool.configuration.diff(body.text, body.name)

    @app.post("/reload")
    async def reload() -> ReloadInfo:
        return await pool.reloader.reload()
