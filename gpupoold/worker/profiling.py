"""Profiling of a model's steps at its registration, by a short series of synthetic requests.

Prefills of growing length give the prefill model; a growing batch, decoding at a few context
lengths, gives the decode model. Both series go from cheap to expensive and end where the next point
would exceed the budget, so a slow model gets fewer points instead of a longer wait.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpupoold.checkpoints.files import read_json
from gpupoold.errors import Failed, Refused
from gpupoold.latency.models import (
    DecodeBatch,
    DecodeSample,
    Fit,
    FitQuality,
    Law,
    LinearDecode,
    LinearPrefill,
    PrefillBatch,
    PrefillModel,
    PrefillSample,
    Profile,
    StoredFit,
    Weighting,
    check_times,
    quality_of,
)
from gpupoold.latency.shape import FitError, LatencyError, ModelShape, ShapeError, from_hf_config
from gpupoold.memory.pages import OutOfPages
from gpupoold.wire.messages import RequestProgress
from gpupoold.worker.engine.configuration import failure

if TYPE_CHECKING:
    from gpupoold.worker.engine.engine import ModelEngine
    from gpupoold.worker.kv.residency import Residency

_logger = logging.getLogger(__name__)

# Timed steps per point, after one warm-up step; decode steps are cheap.
_PREFILL_REPETITIONS = 2
_DECODE_REPETITIONS = 3
_PREFILL_SHARE = 0.5
# Margin on the expected time of the next point, proportional to the number of tokens.
_MARGIN = 1.5
_PREFILLS: tuple[PrefillBatch, ...] = (
    (16,),
    (32,),
    (64,),
    (128,),
    (256,),
    (64,) * 4,
    (512,),
    (1024,),
    (256,) * 4,
    (2048,),
    (4096,),
    (1024,) * 4,
    (8192,),
)
# Beside streams only small prompts can be timed: more points of these.
_SMALL_PREFILLS: tuple[PrefillBatch, ...] = tuple(
    sorted((*_PREFILLS, (8,), (24,), (48,), (96,), (16,) * 4), key=sum)
)
_CONTEXTS = (32, 256, 1024, 4096)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
# Tokens that a decoding request may add while the batch grows.
_DECODE_ROOM = 64
_MAX_CLEARING_STEPS = 8
_MIN_CHUNK_TOKENS = 16
# By how much the first steps of a new size may exceed the limit of a slice.
_TOLERANCE = 2
# Limits on the KV of a run. If less than the minimum is free, other models' pages are evicted.
_MAX_KV_TOKENS = 8_192
_MIN_KV_TOKENS = 2_048

Slices = Generator[None, None, None]
"""A run of steps; ``yield`` ends a slice."""

# A pooling model has no decode steps: the phase takes no time.
_NO_DECODE = Fit(LinearDecode(), FitQuality(1.0, 0.0, 0.0, 0))
# Points required beyond the number of constants: without spare points, noise would fit perfectly.
_SPARE_POINTS = 2

LawT = TypeVar("LawT", bound=Law[Any])

_Array = NDArray[np.float64]

# A column whose part orthogonal to the columns before is smaller counts as dependent.
_MIN_OWN_PART = 1e-9


def profile(
    engine: ModelEngine,
    residency: Residency,
    budget_s: float,
    path: str,
    clock: Callable[[], float] = time.perf_counter,
    slice_limit_s: Callable[[], float] = lambda: math.inf,
) -> Generator[None, None, Profile | None]:
    """Time steps of a model without requests, and fit its latency.

    A slice has one step, which is expected to take at most ``slice_limit_s()``: larger steps are
    left out. A pooling model has prefill steps only.

    Makes the model resident, so the present turn's model must be switched in again. Afterwards the
    engine has no request, no cached prefix and no KV. Too little time or memory, or points that fit
    no model, raise no error: ``Profile.problem`` states the reason.

    ``residency`` provides pages. The slices take ``budget_s`` together, as far as can be foreseen;
    0 means no run. ``path`` is the checkpoint's folder, whose ``config.json`` has the dimensions.
    ``clock`` returns seconds.

    Raises:
        Failed: the engine raised an error in a step, as for a user's request.
    """
    if budget_s <= 0:
        return None
    run = _ProfilingRun(engine, residency, budget_s, clock, slice_limit_s)
    problem = ""
    try:
        yield from run.measure((_PREFILL_SHARE if engine.info.generates else 1) * budget_s)
        run.leave()
    except OutOfPages as error:  # other models hold the memory: not an error of this model
        _logger.warning("profiling %s ended early: %s", engine.info.name, error)
        problem = str(error)
        run.leave()
    except Exception as error:
        raise failure(engine.info.name, "while its steps were timed", error) from error
    measured = fit_profile(
        run.timed, model_shape(path), run.spent_s, problem, generates=engine.info.generates
    )
    if measured.problem and run.num_left_out:
        text = f"larger steps were left out beside running streams: {measured.problem}"
        measured = dataclasses.replace(measured, problem=text)
    _log(engine.info.name, measured)
    return measured


@dataclass(eq=False)
class _ProfilingRun:
    """The synthetic requests of one profiling run, and the times of their steps.

    The run's time does not pass between two slices.
    """

    engine: ModelEngine
    residency: Residency
    budget_s: float
    clock: Callable[[], float]
    slice_limit_s: Callable[[], float]
    num_left_out: int = field(default=0, init=False)
    timed: TimedPoints = field(default_factory=lambda: TimedPoints(), init=False)
    _num_requests: int = field(default=0, init=False)
    _generated: dict[str, int] = field(default_factory=dict, init=False)
    _warm_up_s: float = field(default=0.0, init=False)
    """The first step of the last prefill point."""

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    @property
    def spent_s(self) -> float:
        """Seconds in slices so far."""
        return self.clock() - self._began_s

    def measure(self, prefill_s: float) -> Slices:
        yield from self._new_slice()
        kv_tokens = self._kv_tokens()
        step_tokens = min(kv_tokens, self.engine.max_batched_tokens)
        longest = self.engine.info.max_model_len - 1
        for batch in _SMALL_PREFILLS if math.isfinite(self.slice_limit_s()) else _PREFILLS:
            if max(batch) > longest or sum(batch) > step_tokens:
                continue
            if not (yield from self._measure_prefill(batch, prefill_s)):
                break
        if not self.engine.info.generates:
            return
        contexts = _contexts(self.engine) if self.timed.prefills else []
        for index, context in enumerate(contexts):
            share_s = (self.budget_s - self.spent_s) / (len(contexts) - index)
            yield from self._measure_decodes(context, kv_tokens, self.spent_s + share_s)

    def leave(self) -> None:
        """End all requests and free their KV and cached prefixes."""
        self._clear()
        self.engine.kv.unmap(self.engine.kv.index.idle())

    def _measure_prefill(self, batch: PrefillBatch, end_s: float) -> Generator[None, None, bool]:
        """Measure one point of the prefill series; return False without time or memory."""
        expected_s = 0.0
        if self.timed.prefills:
            last = self.timed.prefills[-1]
            growth = max(1.0, sum(batch) / sum(last.batch))
            expected_s = _MARGIN * self._warm_up_s * growth
            if self._next_prefill_s(sum(batch)) > self.slice_limit_s():
                self.num_left_out += 1
                return False
        times_s: list[float] = []
        while len(times_s) < 1 + _PREFILL_REPETITIONS:
            num_needed = max(1, 2 - len(times_s))  # the warm-up needs a timed step after it
            if self.spent_s + num_needed * expected_s > end_s:
                break
            ids = self._add(batch, max_tokens=1)
            duration_s, progressed = yield from self._step()
            if progressed != ids:  # chunked, or out of pages: not one step
                self._clear()
                break
            self._generated.clear()
            times_s.append(duration_s)
            # The first step of a size takes longer, and any step may be disturbed.
            if min(times_s) > (1 if len(times_s) > 2 else _TOLERANCE) * self.slice_limit_s():
                self.num_left_out += 1
                return False
            expected_s = duration_s
        if len(times_s) < 2:
            return False
        self._warm_up_s = times_s[0]
        self.timed.prefills.append(PrefillSample(batch, min(times_s[1:])))
        return True

    def _next_prefill_s(self, num_tokens: int) -> float:
        """Return the expected seconds of a prefill, on the line through the last two points."""
        last = self.timed.prefills[-1]
        before = self.timed.prefills[-2] if len(self.timed.prefills) > 1 else last
        num_more = sum(last.batch) - sum(before.batch)
        slope = max(0.0, last.duration_s - before.duration_s) / num_more if num_more else 0.0
        return last.duration_s + slope * (num_tokens - sum(last.batch))

    def _measure_decodes(self, context: int, kv_tokens: int, end_s: float) -> Slices:
        """Measure points of one context length: the batch grows until time or memory runs out."""
        max_tokens = _room(self.engine)
        for batch_size in _BATCH_SIZES:
            num_new = batch_size - len(self._generated)
            if batch_size > self.engine.max_sequences:
                break
            if batch_size * (context + max_tokens) > kv_tokens and batch_size > 1:
                break
            if self.spent_s + self._decode_cost_s(num_new, context) > end_s:
                break
            self._add((context,) * num_new, max_tokens)
            if not (yield from self._start_all(num_new * context)):
                break
            sample = yield from self._time_decode(context)
            if sample is None:
                break
            self.timed.decodes.append(sample)
            self.timed.decode_contexts.add(context)
            if _MARGIN * sample.duration_s > self.slice_limit_s():
                self.num_left_out += 1
                break
        self._clear()

    def _decode_cost_s(self, num_new: int, context: int) -> float:
        """Return the expected seconds until the next decode point is measured, with a margin."""
        # New prompts run in steps of new sizes, which may need a warm-up.
        prefill_s = num_new * context * self._warm_up_s / sum(self.timed.prefills[-1].batch)
        step_s = max(
            self.timed.prefills[0].duration_s,
            max((sample.duration_s for sample in self.timed.decodes), default=0.0),
        )
        return _MARGIN * (prefill_s + (2 + _DECODE_REPETITIONS) * step_s)

    def _start_all(self, num_prompt_tokens: int) -> Generator[None, None, bool]:
        """Step until every request has its first token; return False if some cannot start."""
        chunk_tokens = self._chunk_tokens()
        step_tokens = min(self.engine.max_batched_tokens, chunk_tokens or math.inf)
        max_steps = 2 + len(self._generated) + int(2 * num_prompt_tokens / step_tokens)
        for _ in range(max_steps):
            if all(self._generated.values()):
                return True
            yield from self._step(chunk_tokens)
        return all(self._generated.values())

    def _chunk_tokens(self) -> int | None:
        """Return the tokens of a step that takes ``slice_limit_s``; None without a limit."""
        limit_s, last = self.slice_limit_s(), self.timed.prefills[-1]
        if not math.isfinite(limit_s):
            return None
        num_tokens = int(sum(last.batch) * limit_s / last.duration_s)
        return len(self._generated) + max(_MIN_CHUNK_TOKENS, num_tokens)

    def _time_decode(self, context: int) -> Generator[None, None, DecodeSample | None]:
        """Return the fastest decode step; None if a request was preempted or has ended.

        Steps overlap as in a turn: on a GPU the host prepares a step while the device computes the
        step before. Beside streams every step has a slice of its own, so steps do not overlap.
        """
        overlaps = math.isinf(self.slice_limit_s())
        if overlaps:
            yield from self._new_slice()
        best: DecodeSample | None = None
        ended_s, num_ended = self.clock(), 0
        for index in range(3 + _DECODE_REPETITIONS):
            batch, is_last = self._decode_batch(context), index == 2 + _DECODE_REPETITIONS
            if overlaps:
                progressed = self._overlapped_step(is_last=is_last)
                duration_s, ended_s = self.clock() - ended_s, self.clock()
            elif index <= _DECODE_REPETITIONS:
                duration_s, progressed = yield from self._step()
            else:
                break
            if not progressed:  # the first of overlapping steps
                continue
            if progressed != set(self._generated):
                self.engine.end_steps()
                return None
            num_ended += 1
            if is_last or num_ended == 1:  # the host prepares no step beside the last one
                continue
            if best is None or duration_s < best.duration_s:
                best = DecodeSample(batch, duration_s)
        return best

    def _overlapped_step(self, *, is_last: bool) -> set[str]:
        """Begin a step or end the last one; return the requests of the step that has ended."""
        if is_last:
            return self._gained(self.engine.end_steps())
        self.residency.ensure_kv(self.engine.name)
        return self._gained(self.engine.begin_step())

    def _decode_batch(self, context: int) -> DecodeBatch:
        num = len(self._generated)
        return DecodeBatch(num, num * context + sum(self._generated.values()))

    def _add(self, lengths: PrefillBatch, max_tokens: int) -> set[str]:
        added = set()
        for length in lengths:
            self._num_requests += 1
            request_id = f"profiling-{self._num_requests}"
            self.engine.add_synthetic(request_id, length, max_tokens)
            self._generated[request_id] = 0
            added.add(request_id)
        return added

    def _step(
        self, chunk_tokens: int | None = None
    ) -> Generator[None, None, tuple[float, set[str]]]:
        """Return the seconds of one step in a new slice, and the requests that gained a token."""
        yield from self._new_slice()
        self.residency.ensure_kv(self.engine.name)
        started_s = self.clock()
        progress = self.engine.step(chunk_tokens)
        return self.clock() - started_s, self._gained(progress)

    def _gained(self, progress: Sequence[RequestProgress]) -> set[str]:
        """Count the tokens of a step; return the requests that gained some."""
        for item in progress:
            if item.request_id in self._generated:
                self._generated[item.request_id] += item.num_tokens
        return {item.request_id for item in progress if item.num_tokens}

    def _new_slice(self) -> Slices:
        """End the slice; other models may be on the device until the next."""
        left_s = self.clock()
        yield
        self._began_s += self.clock() - left_s
        self.residency.make_resident(self.engine.name)

    def _clear(self) -> None:
        self.engine.abort(list(self._generated))
        self._generated.clear()
        for _ in range(_MAX_CLEARING_STEPS):  # the engine cleans ended requests up in a step
            if not self.engine.has_requests():
                return
            self.engine.step()
        raise Failed(f"{self.engine.info.name}: ended synthetic requests are still in the engine")

    def _kv_tokens(self) -> int:
        """Return the number of tokens whose KV fits into free pages, within the limits."""
        if not self.engine.info.kv_bytes_per_token:
            return _MAX_KV_TOKENS
        geometry = self.engine.kv.geometry
        num_extents = self.residency.pool.num_free // geometry.extent_pages
        free_tokens = num_extents * geometry.blocks_per_extent * self.engine.info.block_size
        return min(_MAX_KV_TOKENS, max(_MIN_KV_TOKENS, free_tokens))


def _contexts(engine: ModelEngine) -> list[int]:
    limit = engine.info.max_model_len - _room(engine)
    chosen = [context for context in _CONTEXTS if 2 * context <= limit]
    return [*chosen, min(limit, _CONTEXTS[-1])] if len(chosen) < len(_CONTEXTS) else chosen


def _room(engine: ModelEngine) -> int:
    return min(_DECODE_ROOM * engine.max_tokens_each, engine.info.max_model_len // 2)


def _log(name: str, measured: Profile) -> None:
    for phase, fit in (("prefill", measured.prefill), ("decode", measured.decode)):
        if fit is not None:
            _logger.info(
                "%s: %s fitted to %d points, R2 %.3f, mean error %.1f %%",
                name,
                phase,
                fit.num_points,
                fit.r_squared,
                100 * fit.mean_relative_error,
            )
    if measured.problem:
        _logger.warning("%s: the latency model is incomplete: %s", name, measured.problem)
    _logger.info("%s: profiled in %.2f s", name, measured.duration_s)


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
    run: TimedPoints, shape: ModelShape | None, duration_s: float, problem: str, *, generates: bool
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
    return fit_law(LinearDecode(), run.decodes)


def _fit_prefill(
    samples: list[PrefillSample], shape: ModelShape | None
) -> Fit[PrefillModel] | Fit[LinearPrefill]:
    """Fit equation 5 if the points determine it, else a straight line."""
    if shape is not None:
        try:
            law = PrefillModel.of(shape)
            _check_enough(law, samples)
            return fit_law(law, samples)
        except FitError as error:
            _logger.info("equation 5 cannot be fitted: %s", error)
    _check_enough(LinearPrefill(), samples)
    return fit_law(LinearPrefill(), samples)


def _check_enough(law: Law[Any], samples: Sequence[PrefillSample | DecodeSample]) -> None:
    wanted = len(law.constants) + _SPARE_POINTS
    if len(samples) < wanted:
        raise FitError(
            f"only {len(samples)} points were measured within the time budget, "
            f"{type(law).__name__} needs {wanted}"
        )


def fit_law(
    law: LawT,
    samples: Sequence[PrefillSample] | Sequence[DecodeSample],
    *,
    weighting: Weighting = Weighting.RELATIVE,
    floors: Sequence[float] = (),
) -> Fit[LawT]:
    """Return the least-squares constants of ``law`` (its own are ignored) for measured steps.

    ``law`` is the model's form, with dimensions if needed. ``samples`` are those of the law's phase
    and must outnumber the constants. ``weighting`` selects absolute or relative errors. ``floors``
    has a lower bound per constant, by default zero.

    Raises:
        FitError: fewer points than constants, points that do not determine the constants (for
            example all prompts of one length), or a time that is not positive.
    """
    check_times(samples)
    width = len(law.constants)
    terms = np.array([law.terms(sample.batch) for sample in samples], float).reshape(-1, width)
    durations_s = np.array([sample.duration_s for sample in samples], float)
    base = np.array(floors or [0.0] * width)
    units_s = durations_s if weighting is Weighting.RELATIVE else np.ones_like(durations_s)
    # The constants above the floors explain the rest of each duration.
    rest = (durations_s - terms @ base) / units_s
    above = solve(terms / units_s[:, None], rest)
    fitted = law.with_constants((base + np.array(above)).tolist())
    return Fit(fitted, quality_of(fitted, samples))


def solve(rows: ArrayLike, targets: ArrayLike) -> list[float]:
    """Return the non-negative ``x`` that minimises the sum of squares of ``rows @ x - targets``.

    ``rows`` has shape (points, columns), ``targets`` (points,); columns are scaled first, so they
    may differ by any factor. Every choice of columns is tried, which is exact and cheap for two or
    three columns.

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
    if found.min() < 0:
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
