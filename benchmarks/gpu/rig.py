"""Common parts of the GPU benchmarks: command line, report, daemons and checkpoints.

A benchmark is a separate process and rewrites its report after each new figure, so that a benchmark
ended early has a report of the figures so far.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench.rig import emulated_config
from benchmarks.gpu import results
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.pieces import add_dry_run
from benchmarks.gpu.shapes import SHAPES, SMALL_SHAPES, TINY_SHAPES, Shape
from benchmarks.gpu.synthetic import make_synthetic
from benchmarks.gpu.turns import Turns
from benchmarks.private_daemon import PrivateDaemon, private_daemon
from gpupoold.config.sections import CUDA_RESERVE_BYTES
from gpupoold.domain import Targets
from gpupoold.worker.process import ENGINE_ARGUMENTS

MAX_MODEL_LEN = 4096
# An emulated device computes in float32, so that answers do not depend on the batch.
_FLOAT32_FACTOR = 2
# Ratio of a GPU's page size to the page size of an emulated device.
_PAGE_FACTOR = 32
_DEVICE_SLACK_BYTES = 1 << 30
_DRY_SLACK_BYTES = 32 << 20

_STATUS_S = 0.5  # within it each worker tells its status

# Saves half a minute for the first model of a shape, and some seconds for further models.
_QUICK_START = {
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
    ENGINE_ARGUMENTS: json.dumps({"max_num_seqs": 64}),
}


@dataclass(slots=True)
class Report:
    """What one benchmark has found so far, in a file."""

    path: Path
    figures: dict[str, Figure] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def add(self, figures: Mapping[str, Figure], **details: Any) -> None:
        """More of it; the file has it when this returns."""
        self.figures |= figures
        self.details |= details
        results.write(self.path, {"figures": self.figures, "details": self.details})


@dataclass(frozen=True, slots=True)
class Setting:
    """How a benchmark is to run. A dry one is the same in small.

    It has a device of its own: an emulated one, or a real one's driver (``is_emulated``).
    """

    name: str
    is_dry: bool
    is_emulated: bool
    scratch: Path
    report: Report
    ends_s: float
    """When it has to have ended, on ``time.monotonic``."""
    num_gpus: int = 1
    """GPUs of a device: a group if several."""

    @property
    def left_s(self) -> float:
        """Seconds it still has."""
        return self.ends_s - time.monotonic()

    @property
    def dtype(self) -> str:
        """What models are added with."""
        return "float32" if self.is_emulated else "auto"

    def label(self, what: str) -> str:
        """How names of figures begin: ``what``, behind the size of the group if there is one."""
        return f"group{self.num_gpus}_{what}" if self.num_gpus > 1 else what

    def shape(self, name: str) -> Shape:
        """The shape of that name, in its size for this run."""
        if self.is_emulated:
            return TINY_SHAPES[name]
        return (SMALL_SHAPES if self.is_dry else SHAPES)[name]

    def dry_bytes(self, num_bytes: int) -> int:
        """What is so much on an emulated device, in a dry run with larger pages."""
        return num_bytes if self.is_emulated else _PAGE_FACTOR * num_bytes

    def weight_bytes(self, name: str) -> int:
        """Bytes of a model of that shape on the device."""
        return self.shape(name).weight_bytes * (_FLOAT32_FACTOR if self.is_emulated else 1)

    def model_cache_bytes(self, names: Sequence[str]) -> int:
        """Host memory for the snapshots of models of these shapes, with their buffers."""
        slack_bytes = self.dry_bytes(_DRY_SLACK_BYTES) if self.is_dry else _DEVICE_SLACK_BYTES
        return sum(map(self.weight_bytes, names)) + slack_bytes

    def checkpoint(self, name: str) -> Path:
        """The folder of a checkpoint of that shape, made if it is not there."""
        return make_synthetic(self.scratch / "checkpoints", self.shape(name))

    def device(
        self, num_bytes: int, dry_slack_bytes: int = _DRY_SLACK_BYTES, num_devices: int = 1
    ) -> str:
        """TOML of devices with so much for models each, and some more. The GPUs of a group share
        the bytes."""
        if self.is_emulated:
            return emulated_config(num_bytes + dry_slack_bytes, num_devices, self.num_gpus)
        slack_bytes = self.dry_bytes(dry_slack_bytes) if self.is_dry else _DEVICE_SLACK_BYTES
        memory = -(-num_bytes // self.num_gpus) + slack_bytes + CUDA_RESERVE_BYTES
        device = f'[[device]]\nkind = "cuda"\nmemory = {memory}\n'
        if self.num_gpus == 1:
            return device
        firsts = range(0, num_devices * self.num_gpus, self.num_gpus)
        groups = (list(range(first, first + self.num_gpus)) for first in firsts)
        return "".join(f"{device}gpus = {gpus}\n" for gpus in groups)

    def whole_device(self) -> str:
        """TOML of a device with all memory of the GPU; an emulated device has a size."""
        return self.device(1 << 30) if self.is_dry else '[[device]]\nkind = "cuda"\n'

    @property
    def folder(self) -> Path:
        """For daemons and others that write logs; it stays until the run is over."""
        return self.scratch / "daemons" / self.name

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Inside this context no other piece of the run measures or starts."""
        turns = Turns.from_environment(os.environ)
        return contextlib.nullcontext() if turns is None else turns.measuring(self.name)

    @contextlib.contextmanager
    def daemon(self, config: str, *, starts_quickly: bool = False) -> Iterator[PrivateDaemon]:
        """A daemon whose folder, with its logs, stays in the scratch folder.

        Where many models are loaded, and steps are not what is measured, it ``starts_quickly``:
        with CUDA graphs, but without torch's compiler, and for batches of up to 64 only.
        """
        if starts_quickly and not self.is_emulated:
            os.environ |= _QUICK_START
        with private_daemon(config, self.folder, timeout_s=max(1.0, self.left_s)) as daemon:
            yield daemon


def add_timed(
    setting: Setting,
    daemon: PrivateDaemon,
    name: str,
    path: Path,
    max_model_len: int = MAX_MODEL_LEN,
    targets: Targets | None = None,
) -> None:
    """Register a model and report how long that took; by default with the default targets.

    Return when its snapshot is pinned: what is measured later is the speed of pinned memory.
    """
    started_s = time.perf_counter()
    options: dict[str, object] = {"dtype": setting.dtype, "max_model_len": max_model_len}
    if targets is not None:
        options |= {"ttft_s": targets.ttft_s, "tbt_s": targets.tbt_s}
    daemon.add_model(name, path, **options)
    loads_s = setting.report.details.get("loads_s", {})
    setting.report.add({}, loads_s=loads_s | {name: time.perf_counter() - started_s})
    if not setting.is_emulated:
        _wait_for_pinning(setting, daemon)


def _wait_for_pinning(setting: Setting, daemon: PrivateDaemon) -> None:
    """Return when all host memory is pinned that the drivers pin."""
    is_pinned = False
    with daemon.client() as client:
        while not is_pinned and setting.left_s > 0:
            time.sleep(_STATUS_S)  # also after a load: the next status has its bytes
            is_pinned = all(memory.problem for memory in client.cache().unpinned)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The command line that all have; see ``setting_of``."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--name", required=True, help="of this piece of the run")
    parser.add_argument("--out", type=Path, required=True, help="the report, as JSON")
    parser.add_argument("--scratch", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds it may take")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of a device: a group if several")
    add_dry_run(parser)
    return parser


def setting_of(args: argparse.Namespace) -> Setting:
    """What the command line says."""
    ends_s = time.monotonic() + args.limit
    is_dry, is_emulated = bool(args.dry_run), args.dry_run == "emulated"
    report = Report(args.out)
    return Setting(args.name, is_dry, is_emulated, args.scratch, report, ends_s, args.gpus)


def shape_main(description: str | None, run: Callable[[Setting, str], None]) -> int:
    """Command line of a benchmark that is of one shape; its exit code."""
    parser = arguments(description)
    parser.add_argument("--shape", default="8B")
    args = parser.parse_args()
    run(setting_of(args), args.shape)
    return 0
