"""``gpupool simulate``: a box that is not there, under a policy, in virtual time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

import typer

from gpupool_cli.diagnostics import say
from gpupool_cli.options import JsonOption, TbtOption, TtftOption, duration_s
from gpupool_cli.output import Column, duration_text, print_line, print_table
from gpupoold.domain import DEFAULT_TBT_S, DEFAULT_TTFT_S, Targets
from gpupoold.errors import UsageError
from gpupoold.sim.boxes import parse_box
from gpupoold.sim.run import Point, run_point

N = TypeVar("N", int, float)

_DURATION_S = 600.0

_COLUMNS = (
    Column("POLICY"),
    Column("DEVICES"),
    Column("MODELS", right=True),
    Column("RPS", right=True),
    Column("SLO%", right=True),
    Column("PAPER%", right=True),
    Column("TTFT-p50", right=True),
    Column("TTFT-p99", right=True),
    Column("TBT-p99", right=True),
    Column("SWITCHES", right=True),
)


def simulate(
    devices: Annotated[str, typer.Option(help="The box, such as 16xH800 or 4xA10.")] = "16xH800",
    policies: Annotated[
        str, typer.Option("--policy", help="Policies to compare, separated by commas.")
    ] = "gpupool,request-level",
    models: Annotated[str, typer.Option(help="Numbers of models, separated by commas.")] = "40,70",
    rps: Annotated[str, typer.Option(help="Requests per second and model, by commas.")] = "0.1",
    ttft: TtftOption = None,
    tbt: TbtOption = None,
    duration: Annotated[
        float | None,
        typer.Option(parser=duration_s, metavar="DURATION", help="How long requests arrive."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Simulate a box of GPUs under Poisson arrivals with ShareGPT lengths.

    Without --ttft, --tbt and --duration these are 10s, 100ms and 10m.
    """
    box = parse_box(devices)
    targets = Targets(ttft or DEFAULT_TTFT_S, tbt or DEFAULT_TBT_S)
    points = [
        Point(box, num_models, rate, policy, targets, duration or _DURATION_S, seed)
        for policy, num_models, rate in itertools.product(
            policies.split(","), _numbers(models, int), _numbers(rps, float)
        )
    ]
    rows: list[Mapping[str, object]] = []
    for number, point in enumerate(points, start=1):
        say(f"{number} of {len(points)}: {point.policy}, {point.num_models} models")
        row = run_point(point)
        if as_json:
            print_line(json.dumps(row))
        rows.append(row)
    if not as_json:
        print_table(_COLUMNS, [_cells(row) for row in rows])


def _numbers(text: str, kind: type[N]) -> list[N]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is not a list of numbers", "write it like 40,70,100") from None


def _cells(row: Mapping[str, object]) -> Sequence[str]:
    shares = [_percent(row["attainment"]), _percent(row["attainment_paper"])]
    times = [_seconds(row[key]) for key in ("ttft_p50_s", "ttft_p99_s", "tbt_p99_s")]
    named = [str(row[key]) for key in ("policy", "devices", "models", "rps")]
    return [*named, *shares, *times, str(row["switches"])]


def _percent(value: object) -> str:
    return f"{value:.1%}".rstrip("%") if isinstance(value, float) else "-"


def _seconds(value: object) -> str:
    return duration_text(value if isinstance(value, float) else None)
