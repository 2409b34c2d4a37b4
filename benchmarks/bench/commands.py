"""``gpupool bench``: measurements on a private daemon, each with a limit or rival."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.bench.loads import run_load_bench
from benchmarks.bench.memory import run_memory_bench
from benchmarks.bench.overhead import EMULATED_OPTIONS, KV_BYTES, OverheadPlan, measure_overhead
from benchmarks.bench.rig import emulated_config, make_checkpoints
from benchmarks.bench.switch import MAX_MODEL_LEN, run_switch_bench
from benchmarks.bench.view import show_fields, show_memory, show_switches
from gpupool_cli.diagnostics import say
from gpupool_cli.options import JsonOption
from gpupool_cli.output import print_json
from gpupoold.units import parse_size_bytes

app = typer.Typer(
    no_args_is_help=True, help="Measure this machine, with a limit beside each figure."
)

GpusOption = Annotated[
    int, typer.Option("--gpus", min=1, max=8, help="GPUs of the device: a group if several.")
]
SizeOption = Annotated[str, typer.Option("--size", help="Weight bytes of a model, in float32.")]


@app.command("switch")
def switch(
    size: SizeOption = "300MB",
    rounds: Annotated[int, typer.Option(min=1, help="Switches each way.")] = 20,
    gpus: GpusOption = 1,
    link: Annotated[
        str, typer.Option(help="Use an emulated device with a modelled link, such as 2GB/s.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Switch between two models: resident, prefetched, in host memory; without and with KV."""
    with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as folder:
        result = run_switch_bench(Path(folder), parse_size_bytes(size), rounds, gpus, link)
    if as_json:
        print_json(result)
    else:
        show_switches(result)


@app.command("memory")
def memory(
    size: SizeOption = "30MB",
    kv: Annotated[str, typer.Option("--kv", help="Bytes of KV to move out and in.")] = "128MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all measurements.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Measure mapping and copies on this device, and a model's KV out and in."""
    with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as folder:
        result = run_memory_bench(
            Path(folder), parse_size_bytes(size), parse_size_bytes(kv), rounds
        )
    if as_json:
        print_json(result)
    else:
        show_memory(result)


@app.command("load")
def load(
    size: SizeOption = "400MB",
    rounds: Annotated[int, typer.Option(min=1, help="Loads with and without a stream.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Add a model beside a stream of another: the stream's longest pause, with and without."""
    with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as folder:
        result = run_load_bench(Path(folder), parse_size_bytes(size), rounds)
    if as_json:
        print_json(result)
    else:
        show_fields(result)


@app.command("overhead")
def overhead(
    size: SizeOption = "100MB",
    rounds: Annotated[int, typer.Option(min=1, help="Alternations of the two servers.")] = 5,
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 4,
    gpus: GpusOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Serve one model through gpupool and through ``vllm serve`` alternately; compare."""
    options = (*EMULATED_OPTIONS, "--tensor-parallel-size", str(gpus))
    plan = OverheadPlan(
        rounds=rounds, num_streams=streams, max_model_len=MAX_MODEL_LEN, vllm_options=options
    )
    with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as folder:
        [checkpoint] = make_checkpoints(Path(folder), ["llama"], parse_size_bytes(size), gpus)
        say("starting gpupoold and vllm serve")
        # As much KV as vLLM has. Checkpoints are up to 5 % larger than their size.
        num_bytes = int(1.1 * parse_size_bytes(size)) + gpus * KV_BYTES
        config = emulated_config(num_bytes, num_gpus=gpus)
        result = measure_overhead(plan, checkpoint, config)
    if as_json:
        print_json(result)
    else:
        show_fields(result)
