"""Latency of a model on a GPU without local measurements, from ``measured.csv``."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from gpupoold.latency.models import (
    Fit,
    FitQuality,
    LatencyModel,
    LinearDecode,
    PrefillModel,
    SwitchModel,
    Weighting,
)
from gpupoold.latency.shape import DataError, HardwareProfile, ModelShape, builtin_shape, hardware

COLUMNS = (
    "gpu",
    "model",
    "num_gpus",
    "phase",
    "constant_1",
    "constant_2",
    "constant_3",
    "weighting",
    "r_squared",
    "mean_relative_error",
    "p90_relative_error",
    "num_points",
    "source",
    "licence",
)


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """Fitted constants of a model on a kind of GPU, and the origin of the points.

    ``num_gpus`` is the size of the measured tensor-parallel group.
    """

    gpu: str
    model: str
    num_gpus: int
    prefill: Fit[PrefillModel]
    decode: Fit[LinearDecode]
    prefill_weighting: Weighting
    decode_weighting: Weighting
    source: str
    licence: str

    @property
    def shape(self) -> ModelShape:
        """Dimensions of the measured model."""
        return builtin_shape(self.model)


@cache
def measured_profiles() -> tuple[MeasuredProfile, ...]:
    file = resources.files("gpupoold.latency").joinpath("measured.csv")
    return parse(file.read_text("utf-8").splitlines())


def parse(lines: Iterable[str]) -> tuple[MeasuredProfile, ...]:
    """Parse the text of a file written by ``scripts/fit_profiles.py``.

    Raises DataError: the message names the incomplete or malformed line or pair.
    """
    phases: dict[tuple[str, str, int], dict[str, Mapping[str, str]]] = {}
    for number, row in enumerate(csv.DictReader(lines), start=2):
        missing = [column for column in COLUMNS if not row.get(column)]
        if missing or not row["num_gpus"].isdecimal():
            raise DataError(f"measured.csv line {number}: {missing or 'num_gpus'} missing or wrong")
        key = row["gpu"], row["model"], int(row["num_gpus"])
        phases.setdefault(key, {})[row["phase"]] = row
    return tuple(_profile(key, rows) for key, rows in phases.items())


def latency_for(
    gpu: str,
    shape: ModelShape,
    *,
    num_gpus: int = 1,
    bandwidth_bytes_per_s: float | None = None,
    candidates: Sequence[MeasuredProfile] | None = None,
) -> LatencyModel:
    """Return the latency of a model on ``num_gpus`` GPUs of one kind.

    A packaged fit of the same dimensions on the same GPU is used directly; else the fit of the
    nearest pair is scaled, and ``is_scaled`` is set.

    ``gpu`` is a name known to ``hardware``. ``num_gpus`` is the size of the tensor-parallel group.
    ``bandwidth_bytes_per_s`` is the measured rate of host-to-device copies of the whole group, by
    default ``num_gpus`` times the hardware profile's. ``candidates`` are the fits to choose from,
    by default the packaged ones.

    Raises:
        DataError: the GPU is unknown, or no fit exists for a group of that size.
        LatencyError: the bandwidth is not positive.
    """
    profile = hardware(gpu)
    known = measured_profiles() if candidates is None else candidates
    measured = [fit for fit in known if fit.num_gpus == num_gpus]
    if not measured:
        sizes = sorted({fit.num_gpus for fit in known})
        raise DataError(f"no measured fit for {num_gpus} GPUs together: there are {sizes}")
    bandwidth = bandwidth_bytes_per_s
    if bandwidth is None:
        bandwidth = num_gpus * profile.pcie_bandwidth_bytes_per_s
    nearest = min(measured, key=lambda fit: _rank(shape, profile, fit))
    return _carried_over(nearest, shape, profile, SwitchModel(bandwidth))


def _carried_over(
    fit: MeasuredProfile, shape: ModelShape, gpu: HardwareProfile, switch: SwitchModel
) -> LatencyModel:
    from_gpu = hardware(fit.gpu)
    if from_gpu == gpu and _same_dimensions(fit.shape, shape):
        return LatencyModel(fit.prefill.law, fit.decode.law, switch, source=fit.source)
    return LatencyModel(
        scale_prefill(fit.prefill.law, fit.shape, from_gpu, shape, gpu),
        scale_decode(fit.decode.law, fit.shape, from_gpu, shape, gpu, fit.num_gpus),
        switch,
        is_scaled=True,
        source=f"scaled from {fit.model} on {fit.gpu}: {fit.source}",
    )


def _rank(
    shape: ModelShape, gpu: HardwareProfile, fit: MeasuredProfile
) -> tuple[bool, float, int, str, str]:
    """Return a sort key: equal dimensions and GPU first, then the nearest; names break ties."""
    is_exact = hardware(fit.gpu) == gpu and _same_dimensions(fit.shape, shape)
    far = distance(shape, gpu, fit.shape, hardware(fit.gpu))
    parameters_off = abs(fit.shape.num_parameters - shape.num_parameters)
    return not is_exact, far, parameters_off, fit.gpu, fit.model


def _same_dimensions(shape: ModelShape, other: ModelShape) -> bool:
    """Return whether all dimensions are equal, except the number of parameters.

    The vocabulary costs only one row of the last layer per sequence.
    """
    return all(
        getattr(shape, name) == getattr(other, name)
        for name in shape.__slots__
        if name != "num_parameters"
    )


def _profile(key: tuple[str, str, int], rows: Mapping[str, Mapping[str, str]]) -> MeasuredProfile:
    gpu, model, num_gpus = key
    if set(rows) != {"prefill", "decode"}:
        raise DataError(f"measured.csv: {model} on {gpu} has {sorted(rows)}, not both phases")
    shape = builtin_shape(model)
    prefill, decode = rows["prefill"], rows["decode"]
    try:
        return MeasuredProfile(
            gpu=hardware(gpu).name,
            model=model,
            num_gpus=num_gpus,
            prefill=Fit(PrefillModel.of(shape).with_constants(_constants(prefill)), _q(prefill)),
            decode=Fit(LinearDecode().with_constants(_constants(decode)), _q(decode)),
            prefill_weighting=Weighting(prefill["weighting"]),
            decode_weighting=Weighting(decode["weighting"]),
            source=prefill["source"],
            licence=prefill["licence"],
        )
    except ValueError as error:
        raise DataError(f"measured.csv: {model} on {gpu}: {error}") from error


def _constants(row: Mapping[str, str]) -> tuple[float, float, float]:
    constants = float(row["constant_1"]), float(row["constant_2"]), float(row["constant_3"])
    if not all(math.isfinite(constant) and constant >= 0 for constant in constants):
        raise ValueError(f"constants must be finite and not negative, got {constants}")
    return constants


def _q(row: Mapping[str, str]) -> FitQuality:
    return FitQuality(
        float(row["r_squared"]),
        float(row["mean_relative_error"]),
        float(row["p90_relative_error"]),
        int(row["num_points"]),
    )


def distance(
    shape: ModelShape, gpu: HardwareProfile, other_shape: ModelShape, other_gpu: HardwareProfile
) -> float:
    """Return the distance of a measured pair from a requested pair: sum of logarithms of ratios.

    Compares the work per token, the KV per token, compute and memory bandwidth.
    """
    ratios = (
        _work(shape) / _work(other_shape),
        shape.kv_bytes_per_token / other_shape.kv_bytes_per_token,
        gpu.bf16_flops / other_gpu.bf16_flops,
        gpu.memory_bandwidth_bytes_per_s / other_gpu.memory_bandwidth_bytes_per_s,
    )
    return math.fsum(abs(math.log(ratio)) for ratio in ratios)


def scale_prefill(
    law: PrefillModel,
    from_shape: ModelShape,
    from_gpu: HardwareProfile,
    to_shape: ModelShape,
    to_gpu: HardwareProfile,
) -> PrefillModel:
    """Scale the prefill model of one pair to another pair.

    Each constant scales with the quantities behind its term:

        constant             with the model                 with the GPU
        C1 (projections)     layers (h, m are in the term)  compute
        C2 (attention)       layers (h is in the term)      compute
        C3 (fixed)           layers                         nothing: kernel launches by the host
        k2 (context)         KV bytes per token             memory bandwidth
        c2 (per sequence)    nothing                        nothing: work of the host
        c3 (weights)         layers * (4h^2 + 2hm) * dtype  root of memory bandwidth
        c3 of a group        layers                         root of memory bandwidth

    Equation 6 counts a token's KV as 3h; KV bytes are the same for plain attention and right for
    grouped-query attention too. The root stands for a fixed part that is half reading weights, half
    launching kernels: with the full ratio, and c2 scaled like compute, each packaged pair was
    predicted worse from the other pairs (``docs/internals/latency.md`` has the errors). The GPUs of
    a group have little to read each; their steps are launches and exchanges, a number per layer. A
    group never takes less than the read of its weights.
    """
    layers = to_shape.num_layers / from_shape.num_layers
    compute = from_gpu.bf16_flops / to_gpu.bf16_flops
    return PrefillModel(
        to_shape.hidden_size,
        to_shape.intermediate_size,
        c1=law.c1 * layers * compute,
        c2=law.c2 * layers * compute,
        c3=law.c3 * layers,
    )


def scale_decode(
    law: LinearDecode,
    from_shape: ModelShape,
    from_gpu: HardwareProfile,
    to_shape: ModelShape,
    to_gpu: HardwareProfile,
    num_gpus: int = 1,
) -> LinearDecode:
    """Scale the decode model of one pair to another pair, both on groups of ``num_gpus``."""
    kv = to_shape.kv_bytes_on(num_gpus) / from_shape.kv_bytes_on(num_gpus)
    memory = from_gpu.memory_bandwidth_bytes_per_s / to_gpu.memory_bandwidth_bytes_per_s
    return LinearDecode(
        context_s=law.context_s * kv * memory,
        sequence_s=law.sequence_s,
        base_s=_base_s(law.base_s * math.sqrt(memory), from_shape, to_shape, to_gpu, num_gpus),
    )


def _base_s(
    base_s: float,
    from_shape: ModelShape,
    to_shape: ModelShape,
    to_gpu: HardwareProfile,
    num_gpus: int,
) -> float:
    if num_gpus == 1:
        read = _work(to_shape) * to_shape.dtype_bytes
        return base_s * read / (_work(from_shape) * from_shape.dtype_bytes)
    read_s = to_shape.weight_bytes / (num_gpus * to_gpu.memory_bandwidth_bytes_per_s)
    return max(read_s, base_s * to_shape.num_layers / from_shape.num_layers)


def _work(shape: ModelShape) -> int:
    return shape.num_layers * shape.matmul_term
