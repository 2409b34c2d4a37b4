"""``usage``: tokens, seconds of GPUs and energy by model and API key."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from gpupool_cli import output
from gpupool_cli.options import JsonOption, duration_s
from gpupool_cli.output import columns, size_text
from gpupool_cli.session import open_client
from gpupoold.api.schemas_usage import UseInfo
from gpupoold.domain import DeviceUse
from gpupoold.errors import UsageError
from gpupoold.units import format_duration, format_energy

_DAY_S = 86_400.0
_USE_COLUMNS = columns("MODEL, KEY, REQUESTS>, PROMPT>, TOKENS>, GPU-TIME>, ENERGY>")
_DEVICE_COLUMNS = columns("DEVICE>, TIME>, COMPUTING>, SWITCHING>, ENERGY>")
_FRAGMENTATION_COLUMNS = columns("DEVICE>, KV-HOST>, SLABS>, FRAGMENTATION>")


def usage(
    ctx: typer.Context,
    since_s: Annotated[
        float | None,
        typer.Option(
            "--since",
            metavar="DURATION",
            parser=duration_s,
            help="Length of the period, such as 1h or 30d, in whole hours.  [default: 1d]",
        ),
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Comma-separated values, one row per model and key.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show tokens, GPU time and energy by model and API key, and the devices' work."""
    if as_csv and as_json:
        raise UsageError("--csv and --json exclude each other", "give one of the two")
    with open_client(ctx) as client:
        found = client.usage(_DAY_S if since_s is None else since_s)
    if as_json:
        output.print_json(found)
    elif as_csv:
        _print_csv(found.uses)
    else:
        output.print_table(_USE_COLUMNS, [_use_row(use) for use in found.uses])
        output.print_line("")
        output.print_table(_DEVICE_COLUMNS, [_device_row(device) for device in found.devices])


def print_fragmentation(devices: Sequence[DeviceUse]) -> None:
    """Print the use of the devices' host KV caches, nothing without host KV."""
    rows = [_fragmentation_row(device) for device in devices if device.kv_host_slab_bytes]
    if rows:
        output.print_line("")
        output.print_table(_FRAGMENTATION_COLUMNS, rows)


def _print_csv(uses: Sequence[UseInfo]) -> None:
    writer = csv.DictWriter(sys.stdout, list(UseInfo.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(use.model_dump() for use in uses)


def _use_row(use: UseInfo) -> list[str]:
    return [
        use.model,
        use.key_name or use.api_key or output.NOTHING,
        str(use.num_requests),
        str(use.num_prompt_tokens),
        str(use.num_output_tokens),
        format_duration(use.gpu_s),
        format_energy(use.energy_j) if use.energy_j else output.NOTHING,
    ]


def _device_row(use: DeviceUse) -> list[str]:
    return [
        str(use.device),
        format_duration(use.seconds),
        *(
            f"{format_duration(one)} ({100 * one / use.seconds:.0f}%)" if use.seconds else ""
            for one in (use.computing_s, use.switching_s)
        ),
        output.NOTHING if use.energy_j is None else format_energy(use.energy_j),
    ]


def _fragmentation_row(use: DeviceUse) -> list[str]:
    share = use.kv_host_fragmentation or 0.0
    return [
        str(use.device),
        size_text(use.kv_host_bytes),
        size_text(use.kv_host_slab_bytes),
        f"{100 * share:.1f}%",
    ]
