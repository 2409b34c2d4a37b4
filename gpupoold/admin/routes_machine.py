"""The admin API's route about the daemon's surroundings."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from fastapi import FastAPI

from gpupoold.api.schemas_machine import FolderInfo, MachineInfo
from gpupoold.control.configuration import Configuration
from gpupoold.control.control_plane import ControlPlane
from gpupoold.system.folders import hint_to_write


def add_machine_routes(app: FastAPI, control_plane: ControlPlane) -> None:
    """Add the route with the folders and limits that only the daemon itself can find out."""

    @app.get("/machine")
    async def show_machine() -> MachineInfo:
        # In a thread, because a network disk may not answer.
        return await asyncio.to_thread(_machine, control_plane.configuration)


def _machine(configuration: Configuration) -> MachineInfo:
    # Imported here, because no other route needs the probes.
    from gpupoold.doctor.probe_folders import folder_facts
    from gpupoold.doctor.probe_limits import limit_facts
    from gpupoold.doctor.probe_memory import memory_facts

    limits = limit_facts()
    return MachineInfo(
        config_path=None if configuration.path is None else str(configuration.path),
        folders=[
            FolderInfo(**asdict(one) | {"path": str(one.path), "hint": hint_to_write(one.path)})
            for one in folder_facts(configuration.settings)
        ],
        open_files=limits.open_files,
        processes=limits.processes,
        locked_bytes=limits.locked_bytes,
        address_space_bytes=limits.address_space_bytes,
        memory_limit_bytes=memory_facts().limit_bytes,
    )
