"""``gpupool bench``: measurements on a daemon of their own, each beside its limit or rival."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gpupool_cli.diagnostics import say
from gpupool_cli.options import JsonOption
from gpupool_cli.output import print_fields, print_json
from gpupool_cli.overhead import OverheadPlan, measure_overhead
from gpupool_cli.private_daemon import private_daemon
from gpupoold.admin.models import BenchSwitchRequest
from gpupoold.errors import Failed
from gpupoold.units import format_bytes, format_duration, parse_size_bytes

app = typer.Typer(no_args_is_help=True, help="Measure this machine; each figure beside its limit.")

_MAX_MODEL_LEN = 1024
SizeOption = Annotated[str, typer.Option("--size", help="Weight bytes of a model, in float32.")]


@app.command("switch")
def switch(
    size: SizeOption = "300MB",
    rounds: Annotated[int, typer.Option(min=1, help="Switches each way.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Switch between two models, one resident at a time, against a plain copy of the bytes."""
    with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as folder:
        result = run_switch_bench(Path(folder), parse_size_bytes(size), rounds)
    _show(result, as_json)


@app.command("overhead")
def overhead(
    size: SizeOption = "100MB",
    rounds: Annotated[int, typer.Option(min=1, help="Alternations of the two servers.")] = 5,
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """Serve one model through gpupool and through ``vllm serve`` in turn; compare."""
    plan = OverheadPlan(rounds=rounds, num_streams=streams, max_model_len=_MAX_MODEL_LEN)
    with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as folder:
        checkpoint = make_checkpoints(Path(folder), ["llama"], parse_size_bytes(size))[0]
        say("starting gpupoold and vllm serve")
        result = measure_overhead(plan, checkpoint, device_bytes(parse_size_bytes(size)))
    _show(result, as_json)


def run_switch_bench(folder: Path, size_bytes: int, rounds: int) -> dict[str, Any]:
    """Switch times on a daemon whose device holds one and a half of two equal models.

    Raises:
        GpupoolError: the models could not be made or served.
    """
    say(f"making two checkpoints of {format_bytes(size_bytes)}")
    checkpoints = make_checkpoints(folder, ["llama", "qwen3"], size_bytes)
    config = f'[[device]]\nkind = "emulated"\nmemory = {device_bytes(size_bytes)}\n'
    with private_daemon(config) as daemon:
        names = [path.name for path in checkpoints]
        for path in checkpoints:
            say(f"loading {path.name}")
            daemon.add_model(path.name, path, dtype="float32", max_model_len=_MAX_MODEL_LEN)
        say(f"switching {2 * rounds} times")
        with daemon.client() as client:
            request = BenchSwitchRequest(models=(names[0], names[1]), rounds=rounds)
            return client.bench_switch(request)


def device_bytes(size_bytes: int) -> int:
    """A device that holds one such model and room for KV, but not two."""
    return int(1.5 * size_bytes)


def make_checkpoints(folder: Path, architectures: list[str], size_bytes: int) -> list[Path]:
    """Random checkpoints, one per architecture, made in a process of its own (it needs torch).

    Raises:
        Failed: with the maker's last words.
    """
    for architecture in architectures:
        command = [sys.executable, "-m", "gpupoold.checkpoints.tiny", str(folder)]
        command += ["--arch", architecture, "--size", str(size_bytes)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise Failed(f"the {architecture} checkpoint could not be made: {last[0]}")
    return [folder / f"tiny-{architecture}" for architecture in architectures]


def _show(result: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    flat = dict(_flatten(result))
    print_fields({name: _text(name, value) for name, value in flat.items()})


def _flatten(result: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in result.items():
        if isinstance(value, Mapping):
            rows.extend(_flatten(value, f"{prefix}{name}."))
        else:
            rows.append((f"{prefix}{name}", value))
    return rows


def _text(name: str, value: object) -> str:
    if isinstance(value, float) and name.endswith("_s") and not name.endswith("per_s"):
        sign = "-" if value < 0 else ""
        return sign + format_duration(abs(value))
    if isinstance(value, int) and name.endswith("bytes"):
        return format_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
