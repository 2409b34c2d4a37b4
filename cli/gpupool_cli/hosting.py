"""``host``: the devices of a model's engines."""

from __future__ import annotations

from typing import Annotated

import typer

from gpupool_cli.diagnostics import say
from gpupool_cli.options import NameArgument
from gpupool_cli.session import open_client
from gpupoold.api.schemas import DeviceInfo, ModelUsage
from gpupoold.api.schemas_models import ModelInfo
from gpupoold.errors import UsageError
from gpupoold.units import format_bytes


def host(
    ctx: typer.Context,
    name: NameArgument,
    devices: Annotated[
        list[int] | None,
        typer.Argument(metavar="[DEVICE]...", min=0, help="Numbers of devices in `gpupool ps`."),
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Leave the choice to the scheduler again.")
    ] = False,
) -> None:
    """Choose the devices that have a model's engine.

    The engine is loaded on these devices, then unloaded from all others, whose answers continue
    on these devices. The choice lasts until another choice or `--auto`.
    """
    if auto == bool(devices):
        raise UsageError(f"{name}: give numbers of devices, or --auto", "see `gpupool ps`")
    with open_client(ctx) as client:
        model = client.host(name, devices or ())
        info = client.model(model.name)
    say(f"{info.name}: {hosting_text(info)}")


def hosting_text(model: ModelInfo) -> str:
    """Return the devices of a model's engines with their memory, and the origin of the choice."""
    engines = [] if model.usage is None else model.usage.engines
    places = ", ".join(
        f"device {engine.device} ({format_bytes(engine.device_bytes)})" for engine in engines
    )
    chosen = ", ".join(map(str, model.devices))
    how = f"by hand: {chosen}" if chosen else "chosen by the scheduler"
    return f"{places or 'on no device'}; {how}"


def engines_text(device: DeviceInfo) -> str:
    """Return the number of a device's engines and their memory outside the pages."""
    if not device.num_engines:
        return "0"
    text = f"{device.num_engines}, {format_bytes(device.engine_bytes)}"
    limit_bytes = device.engine_limit_bytes
    return text if limit_bytes is None else f"{text} of {format_bytes(limit_bytes)}"


def devices_text(model: ModelUsage) -> str:
    """Return the numbers of the devices that host a model."""
    return ",".join(str(engine.device) for engine in model.engines)
