"""Check every family of models against vLLM alone, and write docs/models.md.

    python -m benchmarks.models [--only FAMILY ...] [--missing] [--page-only]

Makes a tiny checkpoint of each family, runs real workers on emulated devices beside vLLM alone, and
keeps the results in ``benchmarks/results/models/families.json``, from which the page is generated.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.families.cells import Cell, Outcome, Row, read_rows, write_rows
from benchmarks.families.checks import Cells, GroupCheck
from benchmarks.families.family import Family
from benchmarks.families.make import make_family
from benchmarks.families.plain import PlainVllm
from benchmarks.families.table import FAMILIES, family_named
from gpupoold.checkpoints.parsers.search import found_parsers
from gpupoold.wire.channel import ChannelClosed

_ROOT = Path(__file__).resolve().parent.parent
RESULTS = _ROOT / "benchmarks" / "results" / "models" / "families.json"
PAGE = _ROOT / "docs" / "models.md"
_FAMILIES_PER_GROUP = 6
# Families that complete a small group, so that its models do not fit on the device together.
_FILLERS = ("mistral", "phi3", "granite", "olmo2")


def check_families(families: Sequence[Family], folder: Path) -> Iterator[tuple[str, Cells, float]]:
    """Yield each family's cells, and its share of the time in seconds.

    A worker that dies ends its group; then each family of the group is checked alone.
    """
    for group in _groups(families):
        started_s = time.monotonic()
        cells = _check_group(group, folder)
        wall_s = (time.monotonic() - started_s) / len(group)
        for family in group:
            yield family.name, cells[family.name], wall_s


def _check_group(group: Sequence[Family], folder: Path) -> dict[str, Cells]:
    names = {family.name for family in group}
    missing = max(0, len(_FILLERS) - len(group))
    fillers = [family_named(name) for name in _FILLERS if name not in names][:missing]
    with PlainVllm(folder / f"{group[0].name}.log") as plain:
        families = {family: make_family(family, folder) for family in (*group, *fillers)}
        check = GroupCheck(families, plain)
        try:
            check.run(folder / f"{group[0].name}.log")
        except (ChannelClosed, TimeoutError, AssertionError) as error:
            if len(group) > 1:
                return {
                    name: cells
                    for family in group
                    for name, cells in _check_group([family], folder).items()
                }
            _set_missing(check.cells[group[0].name], f"the worker died: {error}")
    return check.cells


def _set_missing(cells: Cells, reason: str) -> None:
    for column in ("serve", "switch", "kv", "migrate", "resume"):
        cells.setdefault(column, Cell(Outcome.NO, reason[:300]))


def _parsers(family: Family, folder: Path) -> Cell:
    """Return the parsers that gpupool finds with the family's real chat template."""
    if not family.template:
        return Cell(Outcome.UNTRIED, "no template at hand")
    found = found_parsers(make_family(family, folder), {})
    tool, reasoning = (one.name or "none" for one in (found.tool, found.reasoning))
    return Cell(Outcome.YES, f"tools: {tool}, reasoning: {reasoning}")


def _groups(families: Sequence[Family]) -> Iterator[Sequence[Family]]:
    for start in range(0, len(families), _FAMILIES_PER_GROUP):
        yield families[start : start + _FAMILIES_PER_GROUP]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.models", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="check these families")
    parser.add_argument("--missing", action="store_true", help="check families without results")
    parser.add_argument("--folder", type=Path, default=_ROOT / "build" / "families")
    args = parser.parse_args(argv)
    rows = read_rows(RESULTS)
    chosen = [family_named(name) for name in args.only] if args.only else list(FAMILIES)
    if args.missing:
        chosen = [family for family in chosen if family.name not in rows]
    today = datetime.now(UTC).date().isoformat()
    for name, cells, wall_s in check_families(chosen, args.folder):
        cells["parsers"] = _parsers(family_named(name), args.folder)
        rows[name] = Row(cells=cells, measured_on=today, wall_s=round(wall_s, 1))
        write_rows(RESULTS, rows)
        shown = ", ".join(
            f"{column} {cell.outcome} ({cell.text})" for column, cell in cells.items()
        )
        print(f"{name}: {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
