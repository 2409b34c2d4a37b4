"""The admin API's routes about the configuration."""

from __future__ import annotations

from fastapi import FastAPI

from gpupoold.api.schemas_config import ConfigInfo, DiffInfo, DiffRequest, ReloadInfo
from gpupoold.control.control_plane import ControlPlane


def add_config_routes(app: FastAPI, control_plane: ControlPlane) -> None:
    """Add the routes that show, compare and reload the configuration."""

    @app.get("/config")
    async def show_config() -> ConfigInfo:
        return control_plane.configuration.info()

    @app.post("/config/diff")
    async def diff_config(body: DiffRequest) -> DiffInfo:
        return await control_plane.configuration.diff(body.text, body.name)

    @app.post("/reload")
    async def reload() -> ReloadInfo:
        return await control_plane.reloader.reload()
