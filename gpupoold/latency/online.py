"""Online refinement of a latency model: recursive least squares with forgetting and clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gpupoold.latency.errors import LatencyError
from gpupoold.latency.models import Law

LawT = TypeVar("LawT", bound=Law[Any])

# Part of a step's time that a constant fitted as zero may explain at first.
_SHARE_OF_ZERO = 0.1


@dataclass(frozen=True, slots=True)
class OnlineSettings:
    """Speed and range of changes.

    ``half_life``: number of observations after which an observation has half its weight.
    ``max_error``: larger relative errors are clipped, so a single stall has little effect and a
    lasting change prevails. ``max_change``: a constant stays within this factor of its start.
    ``uncertainty``: relative uncertainty of each constant at the start, and the maximum later.
    """

    half_life: float = 200.0
    max_error: float = 0.3
    max_change: float = 4.0
    uncertainty: float = 0.3

    def __post_init__(self) -> None:
        is_sound = (
            self.half_life > 0
            and self.max_error > 0
            and self.max_change > 1
            and self.uncertainty > 0
        )
        if not is_sound:
            raise LatencyError(
                "half_life, max_error and uncertainty must be positive and max_change above 1, "
                f"got {self}"
            )


class OnlineFit(Generic[LawT]):
    """A fitted model that follows later measurements.

    Constants are stored as multiples of their start, so that terms of any magnitude have equal
    weight. Errors are relative, as in a relative fit. The state is a few numbers, an update a few
    dozen multiplications.
    """

    def __init__(self, law: LawT, settings: OnlineSettings | None = None) -> None:
        if not any(law.constants) or min(law.constants) < 0:
            raise LatencyError(
                f"only a fitted law without negative constants can be refined; got {law}"
            )
        self._settings = settings or OnlineSettings()
        self._law = law
        self._units = list(law.constants)
        self._has_start = [constant > 0 for constant in law.constants]
        self._multiples = [1.0 if started else 0.0 for started in self._has_start]
        width = len(self._units)
        variance = self._settings.uncertainty**2
        self._covariance = [
            [variance if i == j else 0.0 for j in range(width)] for i in range(width)
        ]
        self._forget = 0.5 ** (1 / self._settings.half_life)
        self.num_observations = 0

    @property
    def law(self) -> LawT:
        """The law as of the last observation."""
        return self._law

    def observe(self, batch: Any, duration_s: float) -> float:
        """Refine the law by one measured step; return the relative error of the prediction.

        Ignores a time that is not positive and finite, and a batch with a prediction of zero;
        then returns 0.
        """
        predicted_s = self._law.predict_s(batch)
        if not (math.isfinite(duration_s) and duration_s > 0 and predicted_s > 0):
            return 0.0
        error = duration_s / predicted_s - 1.0
        terms = self._law.terms(batch)
        self._adopt_units(terms, predicted_s)
        row = [unit * term / predicted_s for unit, term in zip(self._units, terms, strict=True)]
        limit = self._settings.max_error
        self._update(row, min(max(error, -limit), limit))
        self.num_observations += 1
        return error

    def _adopt_units(self, terms: Sequence[float], predicted_s: float) -> None:
        """Give a zero constant its unit from the first step with its term."""
        for i, term in enumerate(terms):
            if self._units[i] <= 0 and term > 0:
                self._units[i] = _SHARE_OF_ZERO * predicted_s / term

    def _update(self, row: Sequence[float], error: float) -> None:
        spread = [
            math.fsum(c * x for c, x in zip(line, row, strict=True)) for line in self._covariance
        ]
        # Noise is taken as max_error / 3, so that errors are rarely clipped in normal operation.
        noise = (self._settings.max_error / 3) ** 2
        gain_base = noise * self._forget + math.fsum(
            s * x for s, x in zip(spread, row, strict=True)
        )
        gain = [s / gain_base for s in spread]
        self._multiples = [
            self._bounded(i, multiple + gain[i] * error)
            for i, multiple in enumerate(self._multiples)
        ]
        self._shrink_and_forget(gain, spread)
        constants = [m * u for m, u in zip(self._multiples, self._units, strict=True)]
        self._law = self._law.with_constants(constants)

    def _bounded(self, index: int, multiple: float) -> float:
        lowest = 1 / self._settings.max_change if self._has_start[index] else 0.0
        return min(max(multiple, lowest), self._settings.max_change)

    def _shrink_and_forget(self, gain: Sequence[float], spread: Sequence[float]) -> None:
        """Narrow the covariance by learning, widen it by forgetting, never beyond its start."""
        width = len(gain)
        updated = [
            [(self._covariance[i][j] - gain[i] * spread[j]) / self._forget for j in range(width)]
            for i in range(width)
        ]
        start = self._settings.uncertainty**2
        # Scaling rows and columns alike keeps the matrix symmetric and positive.
        factors = [
            min(1.0, math.sqrt(start / updated[i][i])) if updated[i][i] > 0 else 1.0
            for i in range(width)
        ]
        self._covariance = [
            [(updated[i][j] + updated[j][i]) / 2 * factors[i] * factors[j] for j in range(width)]
            for i in range(width)
        ]
