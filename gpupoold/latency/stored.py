"""Fitted models as plain data, for messages, tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from gpupoold.domain import FittedLaw
from gpupoold.latency.errors import DataError
from gpupoold.latency.fit import Fit
from gpupoold.latency.models import (
    ATTENTION_BLOCK_SIZE,
    DecodeBatch,
    DecodeLaw,
    DecodeModel,
    LatencyModel,
    Law,
    LinearDecode,
    LinearPrefill,
    PrefillLaw,
    PrefillModel,
    SwitchModel,
)

LawT = TypeVar("LawT", bound=Law[Any])


@dataclass(frozen=True, slots=True)
class StoredFit(FittedLaw):
    """A fitted law of prefills or decode steps; the quality is that of ``FitQuality``."""

    @classmethod
    def of(cls, fit: Fit[Any]) -> Self:
        """Convert a fitted model."""
        law, constants, sizes = fit.law, fit.law.constants, (0, 0)
        if isinstance(law, PrefillModel | DecodeModel):
            sizes = law.hidden_size, law.intermediate_size
        if isinstance(law, PrefillModel):
            # The block size is not stored: convert C2 to the default block size.
            c2 = law.c2 * ATTENTION_BLOCK_SIZE / law.block_size
            constants = law.c1, c2, law.c3
        quality = fit.quality
        return cls(
            type(law).__name__,
            tuple(constants),
            quality.r_squared,
            quality.mean_relative_error,
            quality.p90_relative_error,
            quality.num_points,
            *sizes,
        )

    def prefill_law(self) -> PrefillLaw:
        """Return the prefill model.

        Raises:
            DataError: ``law`` is not a prefill model, or the number of constants differs.
        """
        laws: tuple[PrefillLaw, ...] = (
            PrefillModel(self.hidden_size, self.intermediate_size),
            LinearPrefill(),
        )
        return self._of_these("prefill", laws)

    def decode_law(self) -> DecodeLaw:
        """Return the decode model.

        Raises:
            DataError: ``law`` is not a decode model, or the number of constants differs.
        """
        laws: tuple[DecodeLaw, ...] = (
            DecodeModel(self.hidden_size, self.intermediate_size),
            LinearDecode(),
        )
        return self._of_these("decode", laws)

    def _of_these(self, phase: str, laws: Sequence[LawT]) -> LawT:
        """Return the model of the stored name with the stored constants."""
        by_name = {type(law).__name__: law for law in laws}
        law = by_name.get(self.law)
        if law is None:
            raise DataError(f"no {phase} law is named {self.law!r}: there are {', '.join(by_name)}")
        if len(self.constants) != len(law.constants):
            raise DataError(
                f"{len(self.constants)} constants stored, {self.law} has {len(law.constants)}"
            )
        return law.with_constants(self.constants)


@dataclass(frozen=True, slots=True)
class Profile:
    """The result of a profiling run; a phase without enough points has no fit.

    ``problem`` is the reason for a missing fit, empty if both fits exist. ``duration_s`` is the
    device time of the run.
    """

    prefill: StoredFit | None
    decode: StoredFit | None
    duration_s: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class StoredLatency:
    """All measurements of a model on a kind of device.

    ``bandwidth_bytes_per_s`` is the measured rate of weight copies, ``measured_at`` in wall-clock
    seconds.
    """

    device: str
    engine_version: str
    dtype: str
    measured_at: float
    bandwidth_bytes_per_s: float
    prefill: StoredFit | None = None
    decode: StoredFit | None = None

    def prefill_s(self, prompt_lengths: Sequence[int]) -> float | None:
        """Return the seconds to prefill prompts of these lengths in one step; None without a
        fit.
        """
        if self.prefill is None:
            return None
        return self.prefill.prefill_law().predict_s(prompt_lengths)

    def decode_step_s(self, batch_size: int, context_tokens: int) -> float | None:
        """Return the seconds of a decode step over ``context_tokens`` in total; None without a
        fit.
        """
        if self.decode is None:
            return None
        return self.decode.decode_law().predict_s(DecodeBatch(batch_size, context_tokens))

    def switch_s(self, num_bytes: int) -> float:
        """Return the seconds to copy ``num_bytes`` onto the device."""
        return SwitchModel(self.bandwidth_bytes_per_s).predict_s(num_bytes)

    def model(self) -> LatencyModel | None:
        """Return the latency model; None while a phase has no fit.

        Raises:
            DataError: a stored law is unknown.
            LatencyError: the bandwidth is not positive.
        """
        if self.prefill is None or self.decode is None:
            return None
        return LatencyModel(
            self.prefill.prefill_law(),
            self.decode.decode_law(),
            SwitchModel(self.bandwidth_bytes_per_s),
            source=f"measured on {self.device} with {self.dtype}, engine {self.engine_version}",
        )
