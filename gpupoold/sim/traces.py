"""Recorded requests: CSV traces, and transformations for other experiments.

Columns: ``arrival_s``, ``prompt_tokens``, ``output_tokens``, optionally ``model``, ``scenario`` and
``conversation``: the prompt of a conversation's row begins with the prompt and the answer of the
row before. Further columns are ignored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from gpupoold.errors import UsageError
from gpupoold.sim.lengths import OUTPUT, PROMPT, CsvTable
from gpupoold.sim.workloads import SimRequest, model_names

ARRIVAL, MODEL, CONVERSATION = "arrival_s", "model", "conversation"
DEFAULT_MODEL = "model"


def trace_requests(table: CsvTable, default_model: str = DEFAULT_MODEL) -> tuple[SimRequest, ...]:
    """Return the requests of a table with one trace, in order of arrival.

    ``default_model`` is the model of all requests if the table has no column ``model``.

    Raises:
        UsageError: the message names the file, line and column of the error.
    """
    table.require(ARRIVAL, PROMPT, OUTPUT)
    if not table.rows:
        raise UsageError(f"{table.name}: has a header and no requests")
    return tuple(_requests(table, default_model))


def scale_time(requests: Iterable[SimRequest], factor: float) -> tuple[SimRequest, ...]:
    """Multiply all arrival times by ``factor``: 0.5 doubles the load, bursts included.

    Raises:
        UsageError: ``factor`` is not positive.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise UsageError(f"time factor {factor}: must be above 0")
    return tuple(replace(request, arrival_s=request.arrival_s * factor) for request in requests)


def rename_models(
    requests: Iterable[SimRequest], names: Mapping[str, str]
) -> tuple[SimRequest, ...]:
    """Rename models; ``names`` maps old names to new names, which may repeat.

    Raises:
        UsageError: a model in ``names`` has no request here.
    """
    before = tuple(requests)
    unknown = sorted(names.keys() - {one.model for one in before})
    if unknown:
        raise UsageError(f"no requests of {', '.join(unknown)}, so nothing to rename")
    return tuple(replace(one, model=names.get(one.model, one.model)) for one in before)


def fold_models(requests: Sequence[SimRequest], num_models: int) -> tuple[SimRequest, ...]:
    """Fold all requests onto at most ``num_models`` models, named as by ``model_names``.

    Models are dealt out in order of the number of requests (ties by name): the busiest to the first
    name, and so on in rounds. Surplus names have no requests.

    Raises:
        UsageError: ``num_models`` is less than one.
    """
    names = model_names(num_models)
    counts = Counter(request.model for request in requests)
    ranked = sorted(counts, key=lambda model: (-counts[model], model))
    return rename_models(
        requests, {model: names[rank % num_models] for rank, model in enumerate(ranked)}
    )


def _requests(table: CsvTable, default_model: str) -> Iterator[SimRequest]:
    has_model = MODEL in table.columns
    histories: dict[tuple[str, str], int] = {}
    before_s = 0.0
    for number, row in enumerate(table.rows):
        arrival_s = table.number(row, ARRIVAL)
        if arrival_s < before_s:
            problem = f"{arrival_s} comes after {before_s}: arrivals must not go back"
            raise table.error(row, ARRIVAL, problem)
        before_s = arrival_s
        model = table.text(row, MODEL) if has_model else default_model
        lengths = table.count(row, PROMPT), table.count(row, OUTPUT)
        name = table.maybe_text(row, CONVERSATION)
        history_tokens = histories.get((model, name), 0)
        if name:
            histories[model, name] = sum(lengths)
        yield SimRequest(f"r{number}", model, arrival_s, *lengths, name, history_tokens)
