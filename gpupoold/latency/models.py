"""Latency models of a prefill, a decode step and a switch; their fits, also as plain data.

Every model is linear in its constants: seconds are the sum of constant times term. So one
least-squares routine fits all models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from gpupoold.domain import FittedLaw
from gpupoold.latency.shape import DataError, FitError, LatencyError, ModelShape

# Rows of a FlashAttention tile for heads of 128; another value only changes the fitted C2.
ATTENTION_BLOCK_SIZE = 128

PrefillBatch = Sequence[int]  # prompt lengths in tokens, prefilled in one step


class DecodeBatch(NamedTuple):
    """A decode step: number of sequences, and tokens of context in total."""

    batch_size: int
    context_tokens: int


BatchT_contra = TypeVar("BatchT_contra", contravariant=True)


class Law(Protocol[BatchT_contra]):
    """Seconds of a batch as a sum of constants times terms; immutable."""

    @property
    def constants(self) -> tuple[float, ...]:
        """The fitted numbers, in the order of the terms."""
        ...

    def terms(self, batch: BatchT_contra, /) -> tuple[float, ...]:
        """Return each constant's factor; raises ``LatencyError`` on a negative count."""
        ...

    def with_constants(self, constants: Sequence[float], /) -> Self:
        """Return the same law with other constants."""
        ...

    def predict_s(self, batch: BatchT_contra, /) -> float: ...


LawT = TypeVar("LawT", bound=Law[Any])
PrefillLaw = Law[PrefillBatch]


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Aegaeon, equation 5: ``C1 (4 t h^2 + 2 t h m) + C2 * 3 h t2 / b + C3``.

    ``t`` is the number of tokens in the batch, ``t2`` the sum of the squared prompt lengths, ``h``
    and ``m`` the hidden and the FFN size, ``b`` the block size of the attention kernel (128). The
    constants include the number of layers and of devices, and therefore belong to one model on one
    device. C1 and C2 in s per operation, C3 in s.
    """

    hidden_size: int
    intermediate_size: int
    c1: float = 0.0
    c2: float = 0.0
    c3: float = 0.0

    @classmethod
    def of(cls, shape: ModelShape) -> Self:
        return cls(shape.hidden_size, shape.intermediate_size)

    @property
    def constants(self) -> tuple[float, float, float]:
        return self.c1, self.c2, self.c3

    def terms(self, batch: PrefillBatch, /) -> tuple[float, ...]:
        """Return ``4th^2 + 2thm``, ``3 h t2 / b`` and 1."""
        tokens = _total_tokens(batch)
        squares = math.fsum(length * length for length in batch)
        h, m = self.hidden_size, self.intermediate_size
        c1_term = 4.0 * tokens * h * h + 2.0 * tokens * h * m
        return c1_term, 3.0 * h * squares / ATTENTION_BLOCK_SIZE, 1.0

    def with_constants(self, constants: Sequence[float], /) -> Self:
        c1, c2, c3 = constants
        return type(self)(self.hidden_size, self.intermediate_size, c1, c2, c3)

    def predict_s(self, batch: PrefillBatch, /) -> float:
        """Return the seconds to prefill these prompts in one step; 0 for none."""
        return _seconds(self, batch) if batch else 0.0


@dataclass(frozen=True, slots=True)
class LinearPrefill:
    """Aladdin, equation 2: ``k1 * t + c1``, linear in the tokens of the batch.

    ``token_s`` is s per prompt token, ``base_s`` the rest.
    """

    token_s: float = 0.0
    base_s: float = 0.0

    @property
    def constants(self) -> tuple[float, float]:
        return self.token_s, self.base_s

    def terms(self, batch: PrefillBatch, /) -> tuple[float, ...]:
        return float(_total_tokens(batch)), 1.0

    def with_constants(self, constants: Sequence[float], /) -> Self:
        token_s, base_s = constants
        return type(self)(token_s, base_s)

    def predict_s(self, batch: PrefillBatch, /) -> float:
        """Return the seconds to prefill these prompts in one step; 0 for none."""
        return _seconds(self, batch) if batch else 0.0


@dataclass(frozen=True, slots=True)
class LinearDecode:
    """Aladdin, equation 3: ``(k2 * mean context + c2) * b + c3``.

    The mean context times the batch size is the total context, so the model is linear in the batch
    size and in the total context. ``context_s`` is s per token of context, ``sequence_s`` s per
    sequence, ``base_s`` the rest. The paper states the equation for b > 1; here b = 1 is on the
    same line.
    """

    context_s: float = 0.0
    sequence_s: float = 0.0
    base_s: float = 0.0

    @property
    def constants(self) -> tuple[float, float, float]:
        return self.context_s, self.sequence_s, self.base_s

    def terms(self, batch: DecodeBatch, /) -> tuple[float, ...]:
        """Return the total context, the batch size and 1."""
        _check_decode(batch)
        return float(batch.context_tokens), float(batch.batch_size), 1.0

    def with_constants(self, constants: Sequence[float], /) -> Self:
        context_s, sequence_s, base_s = constants
        return type(self)(context_s, sequence_s, base_s)

    def predict_s(self, batch: DecodeBatch, /) -> float:
        """Return the seconds of one step; 0 for an empty batch."""
        return _seconds(self, batch) if batch.batch_size else 0.0


@dataclass(frozen=True, slots=True)
class SwitchModel:
    """Time to bring a model's missing bytes onto the device.

    The bandwidth is *measured*, so it includes the inefficiency of the link and needs no correction
    factor.
    """

    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bandwidth_bytes_per_s) and self.bandwidth_bytes_per_s > 0):
            raise LatencyError(
                f"bandwidth must be positive and finite, got {self.bandwidth_bytes_per_s} bytes/s"
            )

    @classmethod
    def measured(cls, num_bytes: int, duration_s: float) -> Self:
        """Return the model of one copy: ``num_bytes`` in ``duration_s``."""
        if num_bytes <= 0 or duration_s <= 0:
            raise LatencyError(
                f"a measured copy needs bytes and time, got {num_bytes} bytes in {duration_s} s"
            )
        return cls(num_bytes / duration_s)

    def predict_s(self, missing_bytes: int) -> float:
        """Return the seconds to copy ``missing_bytes``, 0 for a resident model."""
        if missing_bytes < 0:
            raise LatencyError(f"missing bytes cannot be negative, got {missing_bytes}")
        return missing_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """A model on a device: all times for the scheduler.

    ``is_scaled``: the constants are scaled from the nearest measured pair; ``source`` names the
    origin.
    """

    prefill: PrefillLaw
    decode: LinearDecode
    switch: SwitchModel
    is_scaled: bool = False
    source: str = ""

    def prefill_s(self, prompt_lengths: Sequence[int]) -> float:
        """Return the seconds to prefill prompts of these lengths in one step."""
        return self.prefill.predict_s(prompt_lengths)

    def decode_step_s(self, batch_size: int, context_tokens: int) -> float:
        """Return the seconds of a decode step over ``context_tokens`` in total."""
        return self.decode.predict_s(DecodeBatch(batch_size, context_tokens))

    def mixed_step_s(
        self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int
    ) -> float:
        """Return the seconds of a step with chunks of prompts beside a decode batch.

        ``chunks``: per prompt the finished tokens and the tokens of this step. The result is a step
        of the batch, or the fixed part of a prefill without a batch, plus the tokens' contribution
        to their prompts' prefill. The weights are read once; no other overlap is assumed, so real
        steps tend to be shorter.
        """
        prefill = self.prefill.predict_s
        tokens_s = math.fsum(prefill([done + new]) - prefill([done]) for done, new in chunks)
        if batch_size:
            return self.decode_step_s(batch_size, context_tokens) + tokens_s
        return prefill([0]) + tokens_s

    def switch_s(self, missing_bytes: int) -> float:
        """Return the seconds to copy the missing bytes to the device."""
        return self.switch.predict_s(missing_bytes)


def _seconds(law: Law[Any], batch: Any) -> float:
    terms = zip(law.constants, law.terms(batch), strict=True)
    return max(0.0, math.fsum(constant * term for constant, term in terms))


def _total_tokens(batch: PrefillBatch) -> int:
    if any(length < 0 for length in batch):
        raise LatencyError(f"a prompt length cannot be negative, got {list(batch)}")
    return sum(batch)


def _check_decode(batch: DecodeBatch) -> None:
    if batch.batch_size < 0 or batch.context_tokens < 0:
        raise LatencyError(f"a decode batch cannot have negative counts, got {batch}")


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

    Raises FitError: there are no samples, or a time is not positive.
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


@dataclass(frozen=True, slots=True)
class StoredFit(FittedLaw):
    """A fitted law of prefills or decode steps; the quality is that of ``FitQuality``."""

    @classmethod
    def of(cls, fit: Fit[Any]) -> Self:
        """Convert a fitted model."""
        law, quality, sizes = fit.law, fit.quality, (0, 0)
        if isinstance(law, PrefillModel):
            sizes = law.hidden_size, law.intermediate_size
        return cls(
            type(law).__name__,
            tuple(law.constants),
            quality.r_squared,
            quality.mean_relative_error,
            quality.p90_relative_error,
            quality.num_points,
            *sizes,
        )

    def prefill_law(self) -> PrefillLaw:
        """Return the prefill model.

        Raises DataError: ``law`` is not a prefill model, or the number of constants differs.
        """
        law = PrefillModel(self.hidden_size, self.intermediate_size)
        laws: tuple[PrefillLaw, ...] = (law, LinearPrefill())
        return self._of_these("prefill", laws)

    def decode_law(self) -> LinearDecode:
        """Return the decode model.

        Raises DataError: ``law`` is not a decode model, or the number of constants differs.
        """
        return self._of_these("decode", (LinearDecode(),))

    def _of_these(self, phase: str, laws: Sequence[LawT]) -> LawT:
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
        """Return the seconds to prefill these prompts in one step; None without a fit."""
        if self.prefill is None:
            return None
        return self.prefill.prefill_law().predict_s(prompt_lengths)

    def decode_step_s(self, batch_size: int, context_tokens: int) -> float | None:
        """Return the seconds of a step over ``context_tokens`` in total; None without a fit."""
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
