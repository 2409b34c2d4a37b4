"""Simulated boxes: devices by name, models by the names of measured models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpupoold.domain import Targets
from gpupoold.errors import UsageError
from gpupoold.latency.models import LatencyModel
from gpupoold.latency.profiles import latency_for
from gpupoold.latency.shape import MAX_GROUP_GPUS, LatencyError, builtin_shape, hardware
from gpupoold.scheduling.events import ModelAdded, costs_of
from gpupoold.sim.workloads import model_names

# Activations, CUDA graphs and the framework's own memory (Aegaeon, section 7.1: about 10 %).
USABLE_SHARE = 0.9
DEFAULT_SHAPES = ("Qwen2.5-7B", "Yi-1.5-9B", "Llama-2-13B")
_MAX_GPUS = 4096
_DEVICES = re.compile(r"(?:(\d+)\s*x\s*)?(?:(\d+)\s*x\s*)?([A-Za-z][\w .-]*)")
_GROUPS = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)")


@dataclass(frozen=True, slots=True)
class Box:
    """``num_devices`` devices of one kind of GPU.

    ``degrees`` are the numbers of GPUs of the devices, in turn: all devices with one entry. With
    more than one GPU a device is a group, in which each GPU has a part of every model: memory and
    links to the host add up.
    """

    num_devices: int
    gpu: str
    degrees: tuple[int, ...] = (1,)

    @property
    def name(self) -> str:
        """Number and kind of GPUs, in the form of ``parse_box``."""
        return f"{sum(self.groups)}x{self.gpu}"

    @property
    def groups(self) -> tuple[int, ...]:
        """The number of GPUs of each device."""
        return tuple(self.degrees[number % len(self.degrees)] for number in range(self.num_devices))

    @property
    def tensor_parallel_size(self) -> int:
        """The GPUs of the largest device."""
        return max(self.groups, default=1)

    @property
    def device_bytes(self) -> int:
        """Memory of the largest device for weights and KV."""
        return self.bytes_of(self.tensor_parallel_size)

    def bytes_of(self, degree: int) -> int:
        """Return the memory of a device of ``degree`` GPUs for weights and KV."""
        return int(hardware(self.gpu).memory_bytes * USABLE_SHARE) * degree

    def grouped(self, tensor_parallel_size: int) -> Box:
        """Return the same GPUs in groups of another size. Raises UsageError for a remainder."""
        num_gpus = sum(self.groups)
        if tensor_parallel_size < 1 or num_gpus % tensor_parallel_size:
            raise UsageError(f"{self.name} cannot be split into groups of {tensor_parallel_size}")
        _check_group(tensor_parallel_size)
        return Box(num_gpus // tensor_parallel_size, self.gpu, (tensor_parallel_size,))

    def split(self, groups: Sequence[int]) -> Box:
        """Return the same GPUs in ``groups``, the largest first.

        Raises UsageError if the groups have more or fewer GPUs together, or a group is too large.
        """
        num_gpus = sum(self.groups)
        if sum(groups) != num_gpus:
            raise UsageError(
                f"the groups {groups_text(groups)} have {sum(groups)} GPUs, {self.name} has "
                f"{num_gpus}",
                "write groups such as 2x4, or 1x4+4x1 for a group of four and four single GPUs",
            )
        for degree in groups:
            _check_group(degree)
        ordered = tuple(sorted(groups, reverse=True))
        is_uniform = len(set(ordered)) == 1
        return Box(len(ordered), self.gpu, ordered[:1] if is_uniform else ordered)


def parse_box(text: str) -> Box:
    """Parse ``16xH800``, ``A10`` or ``2x4xH800`` (two groups of four), as in a configuration.

    Raises UsageError if the form is wrong, there are no devices, or the GPU is unknown.
    """
    match = _DEVICES.fullmatch(text.strip())
    count, degree = (int(match[1] or 1), int(match[2] or 1)) if match is not None else (0, 0)
    if match is None or count < 1 or degree < 1:
        raise UsageError(
            f"{text!r} is not a box of devices", "write it like 16xH800, 4xA10 or 2x4xH800"
        )
    if count * degree > _MAX_GPUS:
        raise UsageError(f"{text!r}: at most {_MAX_GPUS} GPUs fit in a box")
    _check_group(degree)
    try:
        return Box(count, hardware(match[3]).name, (degree,))
    except LatencyError as error:
        raise UsageError(str(error)) from error


def parse_groups(text: str) -> tuple[int, ...]:
    """Parse groups of GPUs, such as ``2x4`` or ``1x4+4x1``; the result has a size per group."""
    sizes: list[int] = []
    for part in text.split("+"):
        match = _GROUPS.fullmatch(part.strip())
        if match is None or not 1 <= int(match[1] or 1) <= _MAX_GPUS or int(match[2]) < 1:
            raise UsageError(f"{text!r} names no groups of GPUs", 'write 2x4, 1x4+4x1, or "auto"')
        sizes += [int(match[2])] * int(match[1] or 1)
    return tuple(sizes)


def groups_text(groups: Sequence[int]) -> str:
    """Return the form of :func:`parse_groups`, the largest groups first."""
    sizes = sorted(set(groups), reverse=True)
    return "+".join(f"{list(groups).count(size)}x{size}" for size in sizes)


def box_models(
    box: Box, num_models: int, targets: Targets, shapes: Sequence[str] = DEFAULT_SHAPES
) -> dict[str, SimModel]:
    """Return ``num_models`` models whose dimensions rotate through ``shapes``.

    Raises UsageError if there are no models, or as for ``models_on``.
    """
    names = model_names(num_models)
    return models_on(box, {n: shapes[i % len(shapes)] for i, n in enumerate(names)}, targets)


def why_too_large(box: Box, shape_name: str) -> str:
    """Return why a model of packaged dimensions exceeds a device of the box, empty if it fits.

    Raises UsageError if the dimensions are unknown.
    """
    try:
        weight_bytes = builtin_shape(shape_name).weight_bytes
    except LatencyError as error:
        raise UsageError(str(error)) from error
    if weight_bytes < box.device_bytes:
        return ""
    degree = box.tensor_parallel_size
    gpus = "one GPU" if degree == 1 else f"{degree} GPUs"
    return (
        f"{shape_name} weighs {weight_bytes / 1e9:.3g} GB, {gpus} of {box.name} "
        f"can hold {box.device_bytes / 1e9:.3g} GB"
    )


def models_on(box: Box, shapes: Mapping[str, str], targets: Targets) -> dict[str, SimModel]:
    """Return models for ``shapes``, a mapping of model names to names of packaged dimensions.

    Raises UsageError if a model is unknown on this GPU, larger than a device, or cannot be divided.
    """
    by_shape = {shape: _model_on(box, shape, targets) for shape in sorted(set(shapes.values()))}
    return {name: replace(by_shape[shape], name=name) for name, shape in shapes.items()}


def _model_on(box: Box, shape_name: str, targets: Targets) -> SimModel:
    degree = box.tensor_parallel_size
    try:
        shape = builtin_shape(shape_name)
        latency = latency_for(box.gpu, shape, num_gpus=degree)
    except LatencyError as error:
        raise UsageError(str(error)) from error
    if too_large := why_too_large(box, shape_name):
        raise UsageError(too_large, "use groups of GPUs (such as 2x4xH800), or larger GPUs")
    if problem := shape.why_undivided(degree):
        raise UsageError(
            f"{shape_name} cannot be divided among {degree} GPUs: {problem}",
            "use groups of another size",
        )
    kv_bytes = shape.kv_bytes_on(degree)
    return SimModel(shape_name, targets, latency, shape.weight_bytes, kv_bytes)


def _check_group(degree: int) -> None:
    if degree > MAX_GROUP_GPUS:
        raise UsageError(f"a group has at most {MAX_GROUP_GPUS} GPUs, not {degree}")


@dataclass(frozen=True, slots=True)
class SimModel:
    """A registered model on one kind of device; models of one ``family``, if any, share engines."""

    name: str
    targets: Targets
    latency: LatencyModel
    weight_bytes: int
    kv_bytes_per_token: int
    generates: bool = True
    family: str = ""

    def added(self) -> ModelAdded:
        """Return the model's event for the scheduling core."""
        return ModelAdded(
            self.name,
            self.targets,
            self.weight_bytes,
            self.kv_bytes_per_token,
            costs_of(self.latency),
            self.generates,
        )
