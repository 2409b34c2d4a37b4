"""Workloads from files: recorded requests, and calls per minute of functions.

Columns of requests: ``arrival_s``, ``prompt_tokens``, ``output_tokens``, optionally ``model``,
``scenario`` and ``conversation``: the prompt of a conversation's row begins with the prompt and the
answer of the row before. Further columns are ignored.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Self

from gpupoold.errors import UsageError
from gpupoold.sim.lengths import (
    OUTPUT,
    PROMPT,
    CsvTable,
    read_table,
    select_scenario,
    sharegpt_lengths,
)
from gpupoold.sim.scenario import Draw, DrawnWorkload, Workload
from gpupoold.sim.workloads import SimRequest, in_arrival_order, model_names

ARRIVAL, MODEL, CONVERSATION = "arrival_s", "model", "conversation"
DEFAULT_MODEL = "model"

MINUTE, FUNCTION, REQUESTS = "minute", "function", "requests"
_HOW_TO_NAME = "name it with --workloads, GPUPOOL_WORKLOADS or workloads_dir under [paths]"


def trace_requests(table: CsvTable, default_model: str = DEFAULT_MODEL) -> tuple[SimRequest, ...]:
    """Return the requests of a table with one trace, in order of arrival.

    ``default_model`` is the model of all requests if the table has no column ``model``. Raises
    UsageError; the message names the file, line and column of the error.
    """
    table.require(ARRIVAL, PROMPT, OUTPUT)
    if not table.rows:
        raise UsageError(f"{table.name}: has a header and no requests")
    requests: list[SimRequest] = []
    histories: dict[tuple[str, str], int] = {}
    before_s = 0.0
    for number, row in enumerate(table.rows):
        arrival_s = table.number(row, ARRIVAL)
        if arrival_s < before_s:
            problem = f"{arrival_s} comes after {before_s}: arrivals must not go back"
            raise table.error(row, ARRIVAL, problem)
        before_s = arrival_s
        model = table.text(row, MODEL) if MODEL in table.columns else default_model
        lengths = table.count(row, PROMPT), table.count(row, OUTPUT)
        name = table.maybe_text(row, CONVERSATION)
        history_tokens = histories.get((model, name), 0)
        if name:
            histories[model, name] = sum(lengths)
        requests.append(SimRequest(f"r{number}", model, arrival_s, *lengths, name, history_tokens))
    return tuple(requests)


def scale_time(requests: Iterable[SimRequest], factor: float) -> tuple[SimRequest, ...]:
    """Multiply all arrival times by ``factor``: 0.5 doubles the load, bursts included.

    Raises UsageError if ``factor`` is not positive.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise UsageError(f"time factor {factor}: must be above 0")
    return tuple(replace(request, arrival_s=request.arrival_s * factor) for request in requests)


def fold_models(requests: Sequence[SimRequest], num_models: int) -> tuple[SimRequest, ...]:
    """Fold all requests onto at most ``num_models`` models, named as by ``model_names``.

    Models are dealt out in order of the number of requests (ties by name): the busiest to the first
    name, and so on in rounds. Surplus names have no requests. Raises UsageError if ``num_models``
    is less than one.
    """
    names = model_names(num_models)
    counts = Counter(request.model for request in requests)
    ranked = sorted(counts, key=lambda model: (-counts[model], model))
    folded = {model: names[rank % num_models] for rank, model in enumerate(ranked)}
    return tuple(replace(request, model=folded[request.model]) for request in requests)


@dataclass(frozen=True, slots=True)
class _InFile(Workload):
    """A workload in a file; ``file`` is a name or, once located, an absolute path.

    The files are not part of the package: a workload names a file, and ``located`` adds the folder.
    """

    file: str

    @property
    def needs_folder(self) -> bool:
        """True if only the file's name is known."""
        return not Path(self.file).is_absolute()

    def located(self, folder: Path | None) -> Self:
        """Return the workload with the file's full path. Raises UsageError if missing."""
        path = Path(self.file)
        if path.is_absolute():
            return self
        if folder is None:
            problem = f"{self.file}: the folder of recorded workloads is not set"
            raise UsageError(problem, _HOW_TO_NAME)
        found = folder.absolute() / path
        if not found.is_file():
            hint = f"for another folder {_HOW_TO_NAME}"
            raise UsageError(f"{found}: there is no such file", hint)
        return replace(self, file=str(found))


@dataclass(frozen=True, slots=True)
class RecordedTrace(_InFile):
    """A CSV file of requests, or its part ``window_s`` (from, until).

    A requested rate per model stretches time: if the load rises, bursts get denser. Requests of a
    file without models are distributed by a seeded draw with Zipf popularity; the models of a file
    are folded onto the requested number.
    """

    scenario: str | None = None
    window_s: tuple[float, float] | None = None

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
                requests = spread(requests, models, draw.seed)
        length_s = self.window_s[1] - self.window_s[0] if self.window_s else requests[-1].arrival_s
        return _scaled(requests, models, max(length_s, 1.0), draw)


@dataclass(frozen=True, slots=True)
class FunctionCalls(_InFile):
    """Calls per minute of many functions (``minute, function, requests``), each function a model.

    Covers ``num_minutes`` from ``first_minute``. Calls are spread at random over each minute;
    lengths are ShareGPT's, because the file has none.
    """

    first_minute: int
    num_minutes: int = 20

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
        return _scaled(requests, models, self.num_minutes * 60.0, draw)

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
    requests: Sequence[SimRequest], models: Sequence[str], seed: int
) -> tuple[SimRequest, ...]:
    """Assign each request to one of ``models``, the k-th with a chance like ``1 / k``."""
    parts = [rank**-1.0 for rank in range(1, len(models) + 1)]
    unit = 1.0 / sum(parts)
    weights = [part * unit for part in parts]
    chosen = Random(f"{seed}/models").choices(models, weights, k=len(requests))
    return tuple(
        replace(request, model=name) for request, name in zip(requests, chosen, strict=True)
    )


def _scaled(
    requests: tuple[SimRequest, ...], models: tuple[str, ...], length_s: float, draw: Draw
) -> DrawnWorkload:
    """Stretch time to the requested rate, then cut at the requested duration."""
    if draw.rps is not None:
        factor = len(requests) / length_s / len(models) / draw.rps
        requests, length_s = scale_time(requests, factor), length_s * factor
    if draw.duration_s is not None and draw.duration_s < length_s:
        length_s = draw.duration_s
        requests = requests[
            : bisect_left(requests, length_s, key=lambda request: request.arrival_s)
        ]
    return DrawnWorkload(requests, models, length_s)


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
