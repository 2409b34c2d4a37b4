"""Failures of a check, as cells of the table."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.families.cells import Cell, Outcome
from benchmarks.families.family import Family
from benchmarks.families.plain import VllmCannot
from gpupoold.wire.channel import ChannelClosed


def problem_of(check: Callable[[Family], None], family: Family) -> Cell | None:
    """Run a check; return the cell of its failure."""
    try:
        check(family)
    except ChannelClosed:
        raise
    except (AssertionError, TimeoutError, VllmCannot) as error:
        [said] = error.args[:1] or [error]
        text = getattr(said, "message", None) or str(said)
        return Cell(Outcome.NO, " ".join(text.split())[:300])
    return None
