"""The latency models of a profiling run, fitted to the times of its steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpupoold.checkpoints.files import read_json
from gpupoold.errors import Refused
from gpupoold.latency.errors import FitError, LatencyError, ShapeError
from gpupoold.latency.fit import DecodeSample, Fit, FitQuality, PrefillSample
from gpupoold.latency.models import Law, LinearDecode, LinearPrefill, PrefillModel
from gpupoold.latency.shape import ModelShape, from_hf_config
from gpupoold.latency.stored import Profile, StoredFit
from gpupoold.worker.fitting import fit_decode, fit_prefill

_logger = logging.getLogger(__name__)

# A pooling model has no decode steps: the phase takes no time.
_NO_DECODE = Fit(LinearDecode(), FitQuality(1.0, 0.0, 0.0, 0))
# Points required beyond the number of constants: without spare points, noise would fit perfectly.
_SPARE_POINTS = 2


def model_shape(path: str) -> ModelShape | None:
    """Return the model's dimensions, None for an architecture that equation 5 does not cover."""
    try:
        return from_hf_config(read_json(Path(path) / "config.json"))
    except (Refused, ValueError, ShapeError) as error:
        _logger.info("%s: %s; the prefill model is fitted without dimensions", path, error)
        return None


@dataclass(slots=True)
class TimedPoints:
    """The times of steps, and the context lengths of the decode steps."""

    prefills: list[PrefillSample] = field(default_factory=list)
    decodes: list[DecodeSample] = field(default_factory=list)
    decode_contexts: set[int] = field(default_factory=set)


def fit_profile(
    run: TimedPoints,
    shape: ModelShape | None,
    duration_s: float,
    problem: str,
    *,
    generates: bool,
) -> Profile:
    """Fit the latency models; ``problem`` is a reason known before."""
    problems = [problem] if problem else []
    prefill = decode = None
    try:
        prefill = StoredFit.of(_fit_prefill(run.prefills, shape))
    except LatencyError as error:
        problems.append(f"prefill: {error}")
    try:
        decode = StoredFit.of(_fit_decode(run) if generates else _NO_DECODE)
    except LatencyError as error:
        problems.append(f"decode: {error}")
    return Profile(prefill, decode, duration_s, "; ".join(problems))


def _fit_decode(run: TimedPoints) -> Fit[LinearDecode]:
    if len(run.decode_contexts) < 2:
        raise FitError("steps were timed at fewer than two context lengths")
    _check_enough(LinearDecode(), run.decodes)
    return fit_decode(LinearDecode(), run.decodes)


def _fit_prefill(
    samples: list[PrefillSample], shape: ModelShape | None
) -> Fit[PrefillModel] | Fit[LinearPrefill]:
    """Fit equation 5 if the points determine it, else a straight line."""
    if shape is not None:
        try:
            law = PrefillModel.of(shape)
            _check_enough(law, samples)
            return fit_prefill(law, samples)
        except FitError as error:
            _logger.info("equation 5 cannot be fitted: %s", error)
    _check_enough(LinearPrefill(), samples)
    return fit_prefill(LinearPrefill(), samples)


def _check_enough(law: Law[Any], samples: Sequence[PrefillSample | DecodeSample]) -> None:
    wanted = len(law.constants) + _SPARE_POINTS
    if len(samples) < wanted:
        raise FitError(
            f"only {len(samples)} points were measured within the time budget, "
            f"{type(law).__name__} needs {wanted}"
        )
