"""``/batches``: the batches of all clients, which the frontends keep."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated

from fastapi import FastAPI, Query

from gpupool_state.batches import BatchRow
from gpupool_state.batches_reader import read_batches
from gpupoold.api.schemas_batches import BatchInfo
from gpupoold.control.control_plane import ControlPlane

Limit = Annotated[int, Query(gt=0, le=10_000)]


def add_batch_routes(app: FastAPI, control_plane: ControlPlane) -> None:
    """Add the route of the batches' states."""

    @app.get("/batches")
    async def batches(ended: bool = False, limit: Limit = 100) -> list[BatchInfo]:
        folder = control_plane.settings.paths.state_dir / "batches"
        rows = await asyncio.to_thread(read_batches, folder, limit, with_ended=ended)
        names = control_plane.keyring.names
        return [_info(row, names) for row in rows]


def _info(row: BatchRow, names: Mapping[str, str]) -> BatchInfo:
    own = {"key": names.get(row.owner, row.owner), "state": row.status, "reason": row.waits_because}
    others = {name: getattr(row, name) for name in BatchInfo.model_fields.keys() - own.keys()}
    return BatchInfo.model_validate(own | others)
