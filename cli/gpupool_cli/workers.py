"""``role``, ``drain`` and ``undrain``: a device's role, and taking a device out of service."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from gpupool_cli.diagnostics import say
from gpupool_cli.session import open_client
from gpupoold.api.schemas import DeviceInfo

app = typer.Typer(no_args_is_help=True, help="Roles of devices: prompts, answers or both.")

DeviceArgument = Annotated[
    int, typer.Argument(metavar="DEVICE", min=0, help="The device's number in `gpupool ps`.")
]


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


def role_text(device: DeviceInfo) -> str:
    """Return the role with its origin, and whether the device drains, as in `gpupool ps`."""
    text = device.role if device.is_role_fixed else f"{device.role} (auto)"
    return f"{text}, draining" if device.is_draining else text
