"""Simulated boxes: devices by name, models by cycling through measured ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpupoold.domain import Targets
from gpupoold.errors import UsageError
from gpupoold.latency.errors import LatencyError
from gpupoold.latency.hardware import hardware
from gpupoold.latency.profiles import latency_for
from gpupoold.latency.shape import builtin_shape
from gpupoold.sim.model import SimModel
from gpupoold.sim.workloads import model_names

# Activations, CUDA graphs and the framework's own memory (Aegaeon, section 7.1: about 10 %).
USABLE_SHARE = 0.9
DEFAULT_SHAPES = ("Qwen2.5-7B", "Yi-1.5-9B", "Llama-2-13B")
_DEVICES = re.compile(r"(?:(\d+)\s*x\s*)?([A-Za-z][\w .-]*)")


@dataclass(frozen=True, slots=True)
class Box:
    """``num_devices`` devices of one kind."""

    num_devices: int
    gpu: str

    @property
    def device_bytes(self) -> int:
        """Memory of one device for weights and KV."""
        return int(hardware(self.gpu).memory_bytes * USABLE_SHARE)


def parse_box(text: str) -> Box:
    """``16xH800`` or ``A10``.

    Raises:
        UsageError: not of that form, no devices, or a GPU that nothing is known of.
    """
    match = _DEVICES.fullmatch(text.strip())
    if match is None or (match[1] is not None and int(match[1]) < 1):
        raise UsageError(f"{text!r} is not a box of devices", "write it like 16xH800 or 4xA10")
    try:
        return Box(int(match[1] or 1), hardware(match[2]).name)
    except LatencyError as error:
        raise UsageError(str(error)) from error


def box_models(
    box: Box, num_models: int, targets: Targets, shapes: Sequence[str] = DEFAULT_SHAPES
) -> dict[str, SimModel]:
    """``num_models`` models whose dimensions take turns through ``shapes``.

    Raises:
        UsageError: no models, or one that nothing is known of on this GPU.
    """
    models: dict[str, SimModel] = {}
    for index, name in enumerate(model_names(num_models)):
        try:
            shape = builtin_shape(shapes[index % len(shapes)])
            latency = latency_for(box.gpu, shape)
        except LatencyError as error:
            raise UsageError(str(error)) from error
        models[name] = SimModel(
            name, targets, latency, shape.weight_bytes, shape.kv_bytes_per_token
        )
    return models
