"""``/fleet``: the daemon as a node of a fleet."""

from __future__ import annotations

from fastapi import FastAPI

from gpupoold.access.fleet import is_secret
from gpupoold.api.schemas_fleet import ChargeKeysRequest, FleetReport, SetFleetRequest
from gpupoold.control.control_plane import ControlPlane
from gpupoold.control.views.fleet import fleet_models
from gpupoold.errors import UsageError


def add_fleet_routes(app: FastAPI, control_plane: ControlPlane) -> None:
    """Add the routes of the fleet's agent, which runs beside the daemon."""
    membership = control_plane.membership

    @app.put("/fleet")
    async def set_fleet(body: SetFleetRequest) -> FleetReport:
        if body.secret and not is_secret(body.secret):
            raise UsageError("a fleet's secret has 64 hexadecimal digits")
        await membership.set(body.secret)
        return await report()

    @app.post("/fleet/charges")
    async def charge_keys(body: ChargeKeysRequest) -> FleetReport:
        control_plane.keyring.charge_elsewhere(body.uses)
        return await report()

    @app.get("/fleet")
    async def report() -> FleetReport:
        devices, cache = control_plane.devices(), control_plane.cache
        ready = [one for one in devices if one.state == "ready"]
        return FleetReport(
            secret=membership.secret,
            http_url=control_plane.http_url,
            is_ready=control_plane.state == "ready",
            device_bytes=[one.device_bytes for one in ready],
            bandwidth_bytes_per_s=max((one.bandwidth_bytes_per_s for one in ready), default=0.0),
            cache_free_bytes=max(0, cache.budget_bytes - cache.used_bytes),
            key_names=control_plane.keyring.names,
            rate_uses=control_plane.keyring.rate_uses,
            models=await fleet_models(
                await control_plane.registry.list(), control_plane.dispatcher, control_plane.fleet
            ),
        )
