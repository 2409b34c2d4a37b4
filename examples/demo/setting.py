"""The setting of both acts: four tiny checkpoints, and a daemon that serves the models."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.bench.rig import emulated_config, weight_bytes
from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.schemas import Ps
from gpupoold.config.schema import default_devices
from gpupoold.domain import Targets
from gpupoold.units import format_bytes, format_duration

BUILD = Path(__file__).resolve().parent.parent.parent / "build"
NUM_EMULATED = 2
WEIGHTS = "16MB"
MAX_LEN = 512
TTFT, TBT = "10s", "100ms"
TARGETS = Targets(10.0, 0.1)


def make_models(console: Console) -> dict[str, Path]:
    console.print(f"[bold]1.[/] four tiny checkpoints of about {WEIGHTS} each, in float32")
    folder = BUILD / "demo-models"
    gpupool(["make-tiny-models", str(folder), "--size", WEIGHTS])
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}


def on_gpu() -> bool:
    return default_devices()[0]["kind"] == "cuda"


def daemon_config() -> str:
    """Return the configuration as TOML; empty with GPUs, which the daemon finds by itself."""
    return "" if on_gpu() else emulated_config(device_bytes(), NUM_EMULATED)


def device_bytes() -> int:
    """Return 1.5 times the weights of the largest checkpoint, in bytes."""
    return int(1.5 * max(map(weight_bytes, (BUILD / "demo-models").iterdir())))


def device_text() -> str:
    if on_gpu():
        return "with the GPUs of this machine"
    return f"two emulated GPUs of {format_bytes(device_bytes())}, for models of {WEIGHTS} each"


def add_models(console: Console, daemon: PrivateDaemon, models: dict[str, Path]) -> None:
    for name, path in models.items():
        options = ["--ttft", TTFT, "--tbt", TBT, "--max-len", str(MAX_LEN), "--dtype", "float32"]
        started_s = time.monotonic()
        gpupool(["add-model", name, "--source", str(path), *options], daemon)
        took = format_duration(time.monotonic() - started_s)
        console.print(f"   gpupool add-model {name} --ttft {TTFT} --tbt {TBT}  [dim]({took})[/]")


def set_aside(console: Console, daemon: PrivateDaemon) -> None:
    """Drain all devices except the first."""
    for device in daemon_ps(daemon).devices[1:]:
        gpupool(["drain", str(device.device)], daemon)
        console.print(
            f"   gpupool drain {device.device}  [dim](part one uses one GPU: GPU {device.device} "
            "takes no work)[/]"
        )


def bring_back(console: Console, daemon: PrivateDaemon) -> None:
    """End all drains."""
    devices = daemon_ps(daemon).devices
    console.print(f"[bold]5.[/] from here on {len(devices)} GPUs take work")
    for device in devices:
        if device.is_draining:
            gpupool(["undrain", str(device.device)], daemon)
            console.print(f"   gpupool undrain {device.device}")


def gpupool(arguments: Sequence[str], daemon: PrivateDaemon | None = None) -> str:
    """Run the command line as a user would; return what it prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if daemon is not None:
        environment["GPUPOOL_SOCKET"] = str(daemon.socket_path)
    command = [sys.executable, "-m", "gpupool_cli.main", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"gpupool {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def daemon_ps(daemon: PrivateDaemon) -> Ps:
    with daemon.client() as client:
        return client.ps()


def new_table(title: str) -> Table:
    return Table(
        title=title,
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
