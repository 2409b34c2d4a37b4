"""Workloads read from files: recorded requests, and calls per minute of functions.

The files are not part of the package: a workload names a file, and ``located`` adds the folder.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Self

from gpupoold.errors import UsageError
from gpupoold.sim.lengths import CsvTable, read_table, select_scenario, sharegpt_lengths
from gpupoold.sim.scenario import Draw, DrawnWorkload
from gpupoold.sim.traces import MODEL, fold_models, scale_time, trace_requests
from gpupoold.sim.workloads import SimRequest, in_arrival_order, model_names, zipf_rates

MINUTE, FUNCTION, REQUESTS = "minute", "function", "requests"
_HOW_TO_NAME = "name it with --workloads, GPUPOOL_WORKLOADS or workloads_dir under [paths]"


@dataclass(frozen=True, slots=True)
class _InFile:
    """A workload in a file; ``file`` is a name or, once located, an absolute path."""

    file: str

    @property
    def needs_folder(self) -> bool:
        """True if only the file's name is known."""
        return not Path(self.file).is_absolute()

    def located(self, folder: Path | None) -> Self:
        """Return the workload with the file's full path. Raises UsageError if missing."""
        return replace(self, file=_found(self.file, folder))


@dataclass(frozen=True, slots=True)
class RecordedTrace(_InFile):
    """A CSV file of requests, or its part ``window_s`` (from, until).

    ``time_scale`` stretches time: below 1 the load rises and bursts get denser. A requested rate
    per model replaces ``time_scale``. Requests of a file without models are distributed by a seeded
    draw with Zipf popularity; the models of a file are folded onto the requested number.
    """

    scenario: str | None = None
    window_s: tuple[float, float] | None = None
    time_scale: float = 1.0
    zipf_exponent: float = 1.0

    def draw(self, draw: Draw) -> DrawnWorkload:
        """Raise UsageError for an error in the file, or an empty window."""
        table = select_scenario(read_table(Path(self.file)), self.scenario)
        requests = trace_requests(table)
        if self.window_s is not None:
            requests = _window(requests, *self.window_s, self.file)
        models = tuple(sorted({request.model for request in requests}))
        if draw.num_models is not None:
            models = tuple(model_names(draw.num_models))
            if MODEL in table.columns:
                requests = fold_models(requests, draw.num_models)
            else:
                requests = spread(requests, models, self.zipf_exponent, draw.seed)
        length_s = self.window_s[1] - self.window_s[0] if self.window_s else requests[-1].arrival_s
        return _scaled(requests, models, max(length_s, 1.0), self.time_scale, draw)


@dataclass(frozen=True, slots=True)
class FunctionCalls(_InFile):
    """Calls per minute of many functions (``minute, function, requests``), each function a model.

    Covers ``num_minutes`` from ``first_minute``. Calls are spread at random over each minute;
    lengths are ShareGPT's, because the file has none. ``time_scale`` as in ``RecordedTrace``.
    """

    first_minute: int
    num_minutes: int = 20
    time_scale: float = 1.0

    def draw(self, draw: Draw) -> DrawnWorkload:
        """Raise UsageError for an error in the file, or an empty window."""
        table = read_table(Path(self.file))
        table.require(MINUTE, FUNCTION, REQUESTS)
        requests = in_arrival_order(self._calls(table, draw.seed))
        if not requests:
            raise UsageError(f"{self.file}: no calls from minute {self.first_minute} on")
        models = tuple(sorted({request.model for request in requests}))
        if draw.num_models is not None:
            models = tuple(model_names(draw.num_models))
            requests = fold_models(requests, draw.num_models)
        return _scaled(requests, models, self.num_minutes * 60.0, self.time_scale, draw)

    def _calls(self, table: CsvTable, seed: int) -> Iterator[SimRequest]:
        lengths = sharegpt_lengths()
        for row in table.rows:
            minute = int(table.number(row, MINUTE)) - self.first_minute
            if not 0 <= minute < self.num_minutes:
                continue
            function = table.text(row, FUNCTION)
            rng = Random(f"{seed}/{function}/{minute}")
            for _ in range(table.count(row, REQUESTS)):
                arrival_s = (minute + rng.random()) * 60
                yield SimRequest("", function, arrival_s, *lengths.sample(rng))


def spread(
    requests: Sequence[SimRequest], models: Sequence[str], exponent: float, seed: int
) -> tuple[SimRequest, ...]:
    """Assign each request to one of ``models``, the k-th with a chance like ``1 / k**exponent``."""
    weights = zipf_rates(models, 1.0, exponent)
    chosen = Random(f"{seed}/models").choices(models, list(weights.values()), k=len(requests))
    return tuple(replace(one, model=name) for one, name in zip(requests, chosen, strict=True))


def _scaled(
    requests: tuple[SimRequest, ...],
    models: tuple[str, ...],
    length_s: float,
    time_scale: float,
    draw: Draw,
) -> DrawnWorkload:
    if draw.rps is not None:
        time_scale = len(requests) / length_s / len(models) / draw.rps
    scaled, length_s = scale_time(requests, time_scale), length_s * time_scale
    if draw.duration_s is not None and draw.duration_s < length_s:
        length_s = draw.duration_s
        scaled = scaled[: bisect_left(scaled, length_s, key=lambda one: one.arrival_s)]
    return DrawnWorkload(scaled, models, length_s)


def _window(
    requests: Sequence[SimRequest], from_s: float, until_s: float, file: str
) -> tuple[SimRequest, ...]:
    inside = tuple(
        replace(request, arrival_s=request.arrival_s - from_s)
        for request in requests
        if from_s <= request.arrival_s < until_s
    )
    if not inside:
        raise UsageError(f"{file}: no requests between {from_s:g} s and {until_s:g} s")
    return inside


def _found(file: str, folder: Path | None) -> str:
    path = Path(file)
    if path.is_absolute():
        return file
    if folder is None:
        raise UsageError(f"{file}: the folder of recorded workloads is not set", _HOW_TO_NAME)
    found = folder.absolute() / path
    if not found.is_file():
        raise UsageError(f"{found}: there is no such file", f"for another folder {_HOW_TO_NAME}")
    return str(found)
