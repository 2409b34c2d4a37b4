"""Least-squares fits of the latency models to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpupoold.latency.models import (
    DecodeLaw,
    DecodeSample,
    Fit,
    Law,
    PrefillLaw,
    PrefillSample,
    Weighting,
    check_times,
    quality_of,
)
from gpupoold.latency.shape import FitError

PrefillT = TypeVar("PrefillT", bound=PrefillLaw)
DecodeT = TypeVar("DecodeT", bound=DecodeLaw)
LawT = TypeVar("LawT", bound=Law[Any])

_Array = NDArray[np.float64]

# A column whose part orthogonal to the columns before is smaller counts as dependent.
_MIN_OWN_PART = 1e-9


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


def _fit(
    law: LawT,
    samples: Sequence[PrefillSample] | Sequence[DecodeSample],
    weighting: Weighting,
    non_negative: bool,
    floors: Sequence[float],
) -> Fit[LawT]:
    check_times(samples)
    width = len(law.constants)
    terms = np.array([law.terms(sample.batch) for sample in samples], float).reshape(-1, width)
    durations_s = np.array([sample.duration_s for sample in samples], float)
    base = np.array(floors or [0.0] * width)
    units_s = durations_s if weighting is Weighting.RELATIVE else np.ones_like(durations_s)
    # The constants above the floors explain the rest of each duration.
    rest = (durations_s - terms @ base) / units_s
    above = solve(terms / units_s[:, None], rest, non_negative=non_negative or bool(floors))
    fitted = law.with_constants((base + np.array(above)).tolist())
    return Fit(fitted, quality_of(fitted, samples))


def solve(rows: ArrayLike, targets: ArrayLike, *, non_negative: bool = False) -> list[float]:
    """Return the ``x`` that minimises the sum of squares of ``rows @ x - targets``.

    ``rows`` has shape (points, columns), ``targets`` (points,); columns are scaled first, so they
    may differ by any factor. With ``non_negative`` every choice of columns is tried, which is exact
    and cheap for two or three columns.

    Raises:
        FitError: fewer points than columns, or linearly dependent columns.
    """
    matrix, right = np.asarray(rows, float), np.asarray(targets, float)
    num_points, width = matrix.shape
    if num_points < max(width, 1):
        raise FitError(f"{num_points} points cannot determine {width} constants: add more")
    scales = np.linalg.norm(matrix, axis=0)
    if not scales.all():
        raise FitError(f"term {scales.argmin() + 1} is zero at all {num_points} points")
    columns = matrix / scales
    found = _unbounded(columns, right)
    if non_negative and found.min() < 0:
        found = _best_non_negative(columns, right)
    solution: list[float] = (found / scales).tolist()
    return solution


def _unbounded(columns: _Array, targets: _Array) -> _Array:
    orthogonal, triangle = np.linalg.qr(columns)
    dependent = np.flatnonzero(abs(triangle.diagonal()) < _MIN_OWN_PART)
    if dependent.size:
        raise FitError(
            f"term {dependent[0] + 1} follows from the terms before it at all {len(targets)} "
            "points: vary prompt lengths, batch sizes and contexts independently"
        )
    return np.linalg.solve(triangle, orthogonal.T @ targets)


def _best_non_negative(columns: _Array, targets: _Array) -> _Array:
    """Try all subsets of columns: the non-negative optimum is the free optimum of its columns."""
    width = columns.shape[1]
    best = np.zeros(width)
    best_error = targets @ targets
    for size in range(1, width):
        for chosen in combinations(range(width), size):
            values = _unbounded(columns[:, chosen], targets)
            if values.min() < 0:
                continue
            candidate = np.zeros(width)
            candidate[list(chosen)] = values
            rest = columns @ candidate - targets
            if (error := rest @ rest) < best_error:
                best, best_error = candidate, error
    return best
