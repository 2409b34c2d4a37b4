"""Measured steps, fitted latency models, and the quality of a fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from gpupoold.latency.errors import FitError
from gpupoold.latency.models import DecodeBatch, Law, PrefillBatch

LawT = TypeVar("LawT", bound=Law[Any])


class PrefillSample(NamedTuple):
    """A measured prefill: the prompt lengths, and seconds."""

    batch: PrefillBatch
    duration_s: float


class DecodeSample(NamedTuple):
    """A measured decode step, and seconds."""

    batch: DecodeBatch
    duration_s: float


class Weighting(StrEnum):
    """The errors to minimise.

    ``absolute``: seconds, so that long steps dominate. ``relative``: per cent of the measured time,
    so that all decades of a grid count equally.
    """

    ABSOLUTE = "absolute"
    RELATIVE = "relative"


@dataclass(frozen=True, slots=True)
class FitQuality:
    """Deviation of a model from its points.

    ``r_squared`` concerns seconds for either weighting; the relative errors are parts of the
    measured time (0.05 is 5 %).
    """

    r_squared: float
    mean_relative_error: float
    p90_relative_error: float
    num_points: int


@dataclass(frozen=True, slots=True)
class Fit(Generic[LawT]):
    """A model with its fitted constants, and its quality."""

    law: LawT
    quality: FitQuality


def quality_of(law: Law[Any], samples: Sequence[PrefillSample | DecodeSample]) -> FitQuality:
    """Return the deviation of ``law`` from any measured steps.

    Raises:
        FitError: there are no samples, or a time is not positive.
    """
    check_times(samples)
    if not samples:
        raise FitError("no points to compare the law with")
    measured = [sample.duration_s for sample in samples]
    predicted = [law.predict_s(sample.batch) for sample in samples]
    mean = math.fsum(measured) / len(measured)
    spread = math.fsum((m - mean) ** 2 for m in measured)
    residual = math.fsum((p - m) ** 2 for p, m in zip(predicted, measured, strict=True))
    relative = sorted(abs(p - m) / m for p, m in zip(predicted, measured, strict=True))
    return FitQuality(
        # If times do not vary, R2 is 1 for an exact law and 0 for all other laws.
        r_squared=1.0 - residual / spread if spread else float(residual == 0.0),
        mean_relative_error=math.fsum(relative) / len(relative),
        p90_relative_error=relative[math.ceil(0.9 * len(relative)) - 1],
        num_points=len(relative),
    )


def check_times(samples: Sequence[PrefillSample | DecodeSample]) -> None:
    """Raise FitError for a time that is not positive and finite, with its point."""
    for i, sample in enumerate(samples):
        if not (math.isfinite(sample.duration_s) and sample.duration_s > 0):
            raise FitError(
                f"point {i}, {sample.batch}: the time must be positive, got {sample.duration_s} s"
            )
