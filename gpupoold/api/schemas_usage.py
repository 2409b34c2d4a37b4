"""Bodies of the admin API for the use of the GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from gpupoold.api.schemas import Body
from gpupoold.domain import DeviceUse, UseCounts


@dataclass
class _User:
    model: str
    api_key: str
    key_name: str


class UseInfo(Body, UseCounts, _User):  # the body has the fields of _User first
    """Use of a model with an API key; ``api_key`` and ``key_name`` are empty without one."""


class UsageInfo(Body):
    """Use since ``since`` (wall-clock seconds), which begins an hour, and work of the devices."""

    since: float
    uses: list[UseInfo]
    devices: list[DeviceUse]
