"""Ordinary least squares for a handful of columns, by Householder QR."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from gpupoold.latency.errors import FitError

# A column is dependent on earlier columns if less than this part of its length is left.
_MIN_OWN_PART = 1e-9


def solve(
    rows: Sequence[Sequence[float]],
    targets: Sequence[float],
    *,
    non_negative: bool = False,
) -> list[float]:
    """Return coefficients that minimise the sum of squares of ``rows * x - targets``.

    ``rows`` and ``targets`` have one entry per point; columns are scaled first, so they may differ
    by any factor. With ``non_negative`` every choice of columns is tried, which is exact and cheap
    for two or three columns.

    Raises:
        FitError: fewer points than columns, or linearly dependent columns.
    """
    width = len(rows[0]) if rows else 0
    if len(rows) < max(width, 1):
        raise FitError(f"{len(rows)} points cannot determine {width or 'any'} constants: add more")
    scales = [math.sqrt(math.fsum(row[j] ** 2 for row in rows)) for j in range(width)]
    if not all(scales):
        raise FitError(f"term {scales.index(0.0) + 1} is zero at all {len(rows)} points")
    columns = [[row[j] / scales[j] for row in rows] for j in range(width)]
    free = _householder(columns, targets)
    if non_negative and min(free) < 0:
        free = _best_non_negative(columns, targets)
    return [value / scale for value, scale in zip(free, scales, strict=True)]


def _best_non_negative(columns: list[list[float]], targets: Sequence[float]) -> list[float]:
    """Return the best non-negative solution: the free optimum of some subset of columns."""
    width = len(columns)
    best = [0.0] * width
    best_error = math.fsum(target**2 for target in targets)
    for size in range(1, width):
        for chosen in combinations(range(width), size):
            values = _householder([columns[j] for j in chosen], targets)
            if min(values) < 0:
                continue
            candidate = [0.0] * width
            for j, value in zip(chosen, values, strict=True):
                candidate[j] = value
            error = _squared_error(columns, targets, candidate)
            if error < best_error:
                best, best_error = candidate, error
    return best


def _squared_error(
    columns: list[list[float]], targets: Sequence[float], values: Sequence[float]
) -> float:
    predicted = (
        math.fsum(value * column[i] for value, column in zip(values, columns, strict=True))
        for i in range(len(targets))
    )
    return math.fsum((p - t) ** 2 for p, t in zip(predicted, targets, strict=True))


def _householder(columns: list[list[float]], targets: Sequence[float]) -> list[float]:
    """Solve for columns of unit length by reflection to a triangle and back substitution."""
    triangle = [list(column) for column in columns]
    right = list(targets)
    for k, column in enumerate(triangle):
        norm = math.sqrt(math.fsum(value * value for value in column[k:]))
        if norm < _MIN_OWN_PART:
            raise FitError(
                f"term {k + 1} follows from the terms before it at all {len(right)} points: "
                "vary prompt lengths, batch sizes and contexts independently"
            )
        mirror = column[k:]
        mirror[0] += math.copysign(norm, mirror[0])
        squared = math.fsum(value * value for value in mirror)
        for vector in (*triangle[k:], right):
            _reflect(vector, mirror, squared, k)
    return _substitute(triangle, right)


def _reflect(vector: list[float], mirror: list[float], squared: float, start: int) -> None:
    along = math.fsum(m * vector[start + i] for i, m in enumerate(mirror))
    factor = 2.0 * along / squared
    for i, m in enumerate(mirror):
        vector[start + i] -= factor * m


def _substitute(triangle: list[list[float]], right: list[float]) -> list[float]:
    width = len(triangle)
    values = [0.0] * width
    for k in reversed(range(width)):
        known = math.fsum(triangle[j][k] * values[j] for j in range(k + 1, width))
        values[k] = (right[k] - known) / triangle[k][k]
    return values
