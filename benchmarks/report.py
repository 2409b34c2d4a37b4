"""The report of a benchmark: figures beside their limits, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.values import value_text

Figure = dict[str, Any]


def at_most(measured: float, limit: float) -> Figure:
    """A figure that is to be small."""
    reached = measured <= limit
    ratio = measured / limit if limit > 0 else None
    return {"measured": measured, "limit": limit, "ratio": ratio, "reached": reached}


def at_least(measured: float, limit: float) -> Figure:
    """A figure that is to be large."""
    return at_most(measured, limit) | {"reached": measured >= limit}


def finish(out: Path, figures: Mapping[str, Mapping[str, Any]], **parts: Any) -> int:
    """Write the figures and ``parts`` to ``out``, and print a table of the figures.

    Returns the exit code of the benchmark: 1 when a figure was missed, else 0.
    """
    reached = all(figure["reached"] for figure in figures.values())
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {"figures": figures, "reached": reached, **parts}
    out.write_text(json.dumps(report, indent=1) + "\n")
    for line in table(figures):
        print(line)
    return 0 if reached else 1


def table(figures: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line per figure."""
    width = max(map(len, figures))
    yield f"{'figure':<{width}}{'measured':>12}{'limit':>12}"
    for name, figure in figures.items():
        values = "".join(f"{value_text(name, figure[key]):>12}" for key in ("measured", "limit"))
        yield f"{name:<{width}}{values}  {'' if figure['reached'] else 'MISSED'}".rstrip()
