"""Simulated boxes: devices by name, models by the names of measured models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
_MAX_GPUS = 4096
_DEVICES = re.compile(r"(?:(\d+)\s*x\s*)?([A-Za-z][\w .-]*)")


@dataclass(frozen=True, slots=True)
class Box:
    """``num_devices`` devices of one kind of GPU.

    With ``tensor_parallel_size`` above 1 a device is a group of GPUs, each with a part of every
    model: memory and links to the host add up.
    """

    num_devices: int
    gpu: str
    tensor_parallel_size: int = 1

    @property
    def name(self) -> str:
        """Number and kind of GPUs, in the form of ``parse_box``."""
        return f"{self.num_devices * self.tensor_parallel_size}x{self.gpu}"

    @property
    def device_bytes(self) -> int:
        """Memory of one device for weights and KV."""
        return int(hardware(self.gpu).memory_bytes * USABLE_SHARE) * self.tensor_parallel_size

    def grouped(self, tensor_parallel_size: int) -> Box:
        """Return the same GPUs in groups of another size. Raises UsageError for a remainder."""
        num_gpus = self.num_devices * self.tensor_parallel_size
        if tensor_parallel_size < 1 or num_gpus % tensor_parallel_size:
            raise UsageError(f"{self.name} cannot be split into groups of {tensor_parallel_size}")
        return Box(num_gpus // tensor_parallel_size, self.gpu, tensor_parallel_size)


def parse_box(text: str, tensor_parallel_size: int = 1) -> Box:
    """Parse ``16xH800`` or ``A10``, in groups of ``tensor_parallel_size``.

    Raises:
        UsageError: the form is wrong, there are no devices, the GPU is unknown, or GPUs are left
            over.
    """
    match = _DEVICES.fullmatch(text.strip())
    if match is None or (match[1] is not None and int(match[1]) < 1):
        raise UsageError(f"{text!r} is not a box of devices", "write it like 16xH800 or 4xA10")
    if match[1] is not None and int(match[1]) > _MAX_GPUS:
        raise UsageError(f"{text!r}: at most {_MAX_GPUS} GPUs fit in a box")
    try:
        box = Box(int(match[1] or 1), hardware(match[2]).name)
    except LatencyError as error:
        raise UsageError(str(error)) from error
    return box.grouped(tensor_parallel_size)


def box_models(
    box: Box, num_models: int, targets: Targets, shapes: Sequence[str] = DEFAULT_SHAPES
) -> dict[str, SimModel]:
    """Return ``num_models`` models whose dimensions rotate through ``shapes``.

    Raises:
        UsageError: there are no models, or as for ``models_on``.
    """
    names = model_names(num_models)
    return models_on(box, {n: shapes[i % len(shapes)] for i, n in enumerate(names)}, targets)


def models_on(box: Box, shapes: Mapping[str, str], targets: Targets) -> dict[str, SimModel]:
    """Return models for ``shapes``, a mapping of model names to names of packaged dimensions.

    Raises:
        UsageError: a model is unknown on this GPU, or larger than a device.
    """
    by_shape = {shape: _model_on(box, shape, targets) for shape in sorted(set(shapes.values()))}
    return {name: replace(by_shape[shape], name=name) for name, shape in shapes.items()}


def _model_on(box: Box, shape_name: str, targets: Targets) -> SimModel:
    try:
        shape = builtin_shape(shape_name)
        latency = latency_for(box.gpu, shape, num_gpus=box.tensor_parallel_size)
    except LatencyError as error:
        raise UsageError(str(error)) from error
    if shape.weight_bytes >= box.device_bytes:
        gpus = "one GPU" if box.tensor_parallel_size == 1 else f"{box.tensor_parallel_size} GPUs"
        raise UsageError(
            f"{shape_name} weighs {shape.weight_bytes / 1e9:.3g} GB, {gpus} of {box.name} "
            f"can hold {box.device_bytes / 1e9:.3g} GB",
            "split the model over several GPUs (--tensor-parallel), or use larger GPUs",
        )
    return SimModel(shape_name, targets, latency, shape.weight_bytes, shape.kv_bytes_per_token)
