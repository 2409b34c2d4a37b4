"""Fits of the latency models to measured steps, and their quality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from gpupoold.latency.errors import FitError
from gpupoold.latency.least_squares import solve
from gpupoold.latency.models import DecodeBatch, DecodeLaw, Law, PrefillBatch, PrefillLaw

PrefillT = TypeVar("PrefillT", bound=PrefillLaw)
DecodeT = TypeVar("DecodeT", bound=DecodeLaw)
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


def fit_prefill(
    law: PrefillT,
    samples: Sequence[PrefillSample],
    *,
    weighting: Weighting = Weighting.RELATIVE,
    non_negative: bool = True,
    floors: Sequence[float] = (),
) -> Fit[PrefillT]:
    """Return the least-squares constants of ``law`` (its own are ignored) for measured prefills.

    ``law`` is the model's form, with dimensions if needed. ``samples`` must outnumber the
    constants. ``weighting`` selects absolute or relative errors. With ``non_negative`` no constant
    is below zero. ``floors`` has a lower bound per constant, which takes precedence over
    ``non_negative``.

    Raises:
        FitError: fewer points than constants, points that do not determine the constants (for
            example all prompts of one length), or a time that is not positive.
    """
    return _fit(law, samples, weighting, non_negative, floors)


def fit_decode(
    law: DecodeT,
    samples: Sequence[DecodeSample],
    *,
    weighting: Weighting = Weighting.RELATIVE,
    non_negative: bool = True,
    floors: Sequence[float] = (),
) -> Fit[DecodeT]:
    """Return the least-squares constants of ``law`` (its own are ignored) for measured decode
    steps.

    Arguments and errors as for ``fit_prefill``.
    """
    return _fit(law, samples, weighting, non_negative, floors)


def quality_of(law: Law[Any], samples: Sequence[PrefillSample | DecodeSample]) -> FitQuality:
    """Return the deviation of ``law`` from any measured steps.

    Raises:
        FitError: there are no samples, or a time is not positive.
    """
    _check_times(samples)
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


def _fit(
    law: LawT,
    samples: Sequence[PrefillSample] | Sequence[DecodeSample],
    weighting: Weighting,
    non_negative: bool,
    floors: Sequence[float],
) -> Fit[LawT]:
    _check_times(samples)
    base = floors or [0.0] * len(law.constants)
    rows: list[Sequence[float]] = []
    targets = []
    for sample in samples:
        terms = law.terms(sample.batch)
        # The solver fits only the time beyond the floors.
        rest_s = sample.duration_s - math.fsum(f * x for f, x in zip(base, terms, strict=True))
        unit_s = sample.duration_s if weighting is Weighting.RELATIVE else 1.0
        rows.append([term / unit_s for term in terms])
        targets.append(rest_s / unit_s)
    above = solve(rows, targets, non_negative=non_negative or bool(floors))
    fitted = law.with_constants([f + x for f, x in zip(base, above, strict=True)])
    return Fit(fitted, quality_of(fitted, samples))


def _check_times(samples: Sequence[PrefillSample | DecodeSample]) -> None:
    for i, sample in enumerate(samples):
        if not (math.isfinite(sample.duration_s) and sample.duration_s > 0):
            raise FitError(
                f"point {i}, {sample.batch}: the time must be positive, got {sample.duration_s} s"
            )
