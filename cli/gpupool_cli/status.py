"""``status``, ``ps`` and ``version``: the present state of the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from gpupool_cli import output
from gpupool_cli.diagnostics import ExitCode, say
from gpupool_cli.options import JsonOption, open_client
from gpupool_cli.output import NOTHING, columns, duration_text, size_text
from gpupoold import __version__
from gpupoold.api import schemas
from gpupoold.api.schemas_models import amount_text
from gpupoold.errors import GpupoolError
from gpupoold.units import format_bytes, format_duration

_DEVICE_COLUMNS = columns(
    "DEVICE>, KIND, STATE*, ROLE, LIVE>, PID>, MEMORY>, FREE>, HOST-KV>, ENGINES>, ON-TURN, "
    "QUOTA>, STEPS>"
)
_GPU_COLUMNS = columns("DEVICE>, GPU>, MEMORY>, FREE>, ALL-USE>, BUSY>, TEMP>, POWER>")
_MODEL_COLUMNS = columns(
    "NAME, STATE*, DEVICES, LIVE>, WAIT>, REFUSED>, RESIDENT>, CACHED>, KV>, PAUSED>, "
    "TTFT-p99>, TBT-p99>, SLO%>"
)
_ADDITION_COLUMNS = columns("ADDING, STAGE*, PROGRESS")

app = typer.Typer(no_args_is_help=True, help="Roles of devices: prompts, answers or both.")

DeviceArgument = Annotated[
    int, typer.Argument(metavar="DEVICE", min=0, help="The device's number in `gpupool ps`.")
]


def status(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Say whether the daemon is ready to serve.

    Exit status 0 if ready, 1 while starting or stopping, 3 if not running.
    """
    with open_client(ctx) as client:
        answer = client.status()
    if as_json:
        output.print_json(answer)
    else:
        output.print_fields(_status_fields(answer))
    if answer.state != "ready":
        raise typer.Exit(ExitCode.FAILED)


def ps(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Show the present state of devices and models."""
    with open_client(ctx) as client:
        answer = client.ps()
    if as_json:
        output.print_json(answer)
        return
    output.print_table(_DEVICE_COLUMNS, [_device_row(device) for device in answer.devices])
    for device in answer.devices:
        if device.loading is not None:
            output.print_line(loading_text(device.device, device.loading))
    gpus = [_gpu_row(device, gpu) for device in answer.devices for gpu in device.gpus]
    if gpus:
        output.print_line("")
        output.print_table(_GPU_COLUMNS, gpus)
    output.print_line("")
    output.print_table(_MODEL_COLUMNS, [_model_row(model) for model in answer.models])
    if answer.additions:
        output.print_line("")
        output.print_table(
            _ADDITION_COLUMNS,
            [(each.name, each.stage, amount_text(each) or NOTHING) for each in answer.additions],
        )


def loading_text(number: int, load: schemas.LoadingInfo) -> str:
    text = f"device {number}: loading {load.model} for {format_duration(load.since_s)}"
    waiting = f"; {load.num_waiting} more to load" if load.num_waiting else ""
    return f"{text} beside the turns: the worker {load.stage}{waiting}"


def version(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Print the versions of gpupool, daemon and engine."""
    daemon: schemas.Status | None = None
    try:
        with open_client(ctx) as client:
            daemon = client.status()
    except GpupoolError:
        pass  # `version` works without a daemon
    versions = {
        "gpupool": __version__,
        "gpupoold": daemon.version if daemon else None,
        "engine": daemon.engine_version if daemon else None,
    }
    if as_json:
        output.print_json(versions)
    else:
        output.print_fields({name: value for name, value in versions.items() if value})


def _status_fields(answer: schemas.Status) -> dict[str, str]:
    fields = {
        "state": answer.state,
        "http": answer.http_url,
        "api keys": f"{answer.num_keys}, {'needed' if answer.are_keys_required else 'not needed'}",
        "version": answer.version,
        "engine": answer.engine_version,
        "pid": str(answer.pid),
        "uptime": format_duration(answer.uptime_s),
        "models": str(answer.num_models),
        "frontends": _frontends_text(answer.frontends),
        "live requests": str(answer.num_live_requests),
        "refused": str(answer.num_refused_requests),
        "model cache": f"{format_bytes(answer.model_cache_bytes)}"
        f" of {format_bytes(answer.model_cache_limit_bytes)}",
        "memory": format_bytes(answer.rss_bytes),
        "state folder": answer.state_dir,
    }
    if answer.dropped_history_rows:
        fields["lost history rows"] = str(answer.dropped_history_rows)
    return fields


def _frontends_text(frontends: Sequence[schemas.FrontendInfo]) -> str:
    num_ready = sum(frontend.state == "ready" for frontend in frontends)
    text = f"{num_ready} of {len(frontends)} ready"
    num_restarts = sum(frontend.num_restarts for frontend in frontends)
    return f"{text}, {num_restarts} restarts" if num_restarts else text


def _device_row(device: schemas.DeviceInfo) -> list[str]:
    return [
        str(device.device),
        f"{device.kind} x{len(device.gpus)}" if device.gpus else device.kind,
        device.state,
        role_text(device),
        str(device.num_requests),
        NOTHING if device.pid is None else str(device.pid),
        size_text(device.device_bytes),
        format_bytes(device.free_bytes),
        size_text(device.kv_host_bytes),
        _engines_text(device),
        device.on_turn or NOTHING,
        duration_text(device.quota_s) if device.on_turn else NOTHING,
        str(device.num_steps),
    ]


def _gpu_row(device: schemas.DeviceInfo, gpu: schemas.GpuInfo) -> list[str]:
    nothing = NOTHING
    return [
        str(device.device),
        str(gpu.gpu),
        size_text(gpu.memory_bytes),
        format_bytes(gpu.free_bytes),
        nothing if gpu.used_bytes is None else format_bytes(gpu.used_bytes),
        nothing if gpu.utilisation is None else f"{100 * gpu.utilisation:.0f} %",
        nothing if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} C",
        nothing if gpu.power_w is None else f"{gpu.power_w:.0f} W",
    ]


def _model_row(model: schemas.ModelUsage) -> list[str]:
    attainment = model.attainment
    return [
        model.name,
        model.state,
        _devices_text(model) or NOTHING,
        str(model.num_live),
        str(model.num_waiting),
        str(model.refused),
        _resident_text(model),
        size_text(model.cached_bytes),
        size_text(model.kv_resident_bytes),
        size_text(model.kv_host_bytes),
        duration_text(model.ttft_p99_s),
        duration_text(model.tbt_p99_s),
        NOTHING if attainment is None else f"{100 * attainment:.1f}",
    ]


def _engines_text(device: schemas.DeviceInfo) -> str:
    """Return the number of a device's engines and their memory outside the pages."""
    if not device.num_engines:
        return "0"
    text = f"{device.num_engines}, {format_bytes(device.engine_bytes)}"
    limit_bytes = device.engine_limit_bytes
    return text if limit_bytes is None else f"{text} of {format_bytes(limit_bytes)}"


def _devices_text(model: schemas.ModelUsage) -> str:
    """Return the devices that host a model, or in brackets those with an engine to take over."""
    if model.slots:
        return f"({','.join(map(str, model.slots))})"
    return ",".join(str(engine.device) for engine in model.engines)


def _resident_text(model: schemas.ModelUsage) -> str:
    """Return the weights in the model's engines, or in brackets those without an engine."""
    if model.unbound_bytes and not model.weights_resident_bytes:
        return f"({format_bytes(sum(model.unbound_bytes.values()))})"
    return size_text(model.weights_resident_bytes)


class RoleChoice(StrEnum):
    """Roles, and leaving the choice to the policy."""

    AUTO = "auto"
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@app.command("set")
def set_role(
    ctx: typer.Context,
    device: DeviceArgument,
    role: Annotated[
        RoleChoice,
        typer.Argument(
            metavar="ROLE", help="auto, prefill, decode or mixed; auto: as the policy says."
        ),
    ],
) -> None:
    """Give a device a role, until the daemon ends. A device that only prefills migrates its
    answers to other devices, which continue them.
    """
    with open_client(ctx) as client:
        answer = client.set_role(device, role.value)
    say(f"device {device}: {role_text(answer)}")


def drain(ctx: typer.Context, device: DeviceArgument) -> None:
    """Drain a device: no new requests, and its requests continue on other devices.

    Returns when the device has no requests. The device stays out of service until `gpupool
    undrain`.
    """
    with open_client(ctx) as client:
        client.drain(device)
    say(f"device {device}: has no requests and gets none until `gpupool undrain {device}`")


def undrain(ctx: typer.Context, device: DeviceArgument) -> None:
    """Return a drained device to service."""
    with open_client(ctx) as client:
        client.undrain(device)
    say(f"device {device}: has work again")


def park(ctx: typer.Context, device: DeviceArgument) -> None:
    """Give the memory of a device without requests back; the next request wakes the device.

    The weights stay in host memory.
    """
    with open_client(ctx) as client:
        client.park(device)
    say(f"device {device}: parked until a request, or `gpupool wake {device}`")


def wake(ctx: typer.Context, device: DeviceArgument) -> None:
    """Wake a parked device."""
    with open_client(ctx) as client:
        client.wake(device)
    say(f"device {device}: awake, or about to be")


def role_text(device: schemas.DeviceInfo) -> str:
    """Return the role with its origin, and whether the device drains, as in `gpupool ps`."""
    text = device.role if device.is_role_fixed else f"{device.role} (auto)"
    return f"{text}, draining" if device.is_draining else text
