"""Check every family of models against vLLM alone, and write docs/models.md.

    python -m benchmarks.models [--only FAMILY ...] [--missing | --page-only] [--gpus N]

Makes a tiny checkpoint of each family, runs real workers on emulated devices beside vLLM alone, and
keeps the results in ``benchmarks/results/models/families.json``. With ``--gpus`` the devices are
groups, vLLM alone has the same tensor parallelism, and the results are in ``groups-N.json`` beside.
The page is generated from all results.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from benchmarks.families.cells import Cell, Outcome, Row, read_rows, write_rows
from benchmarks.families.checks import Cells, GroupCheck
from benchmarks.families.family import Family
from benchmarks.families.make import TEMPLATES, make_family
from benchmarks.families.page import page_text
from benchmarks.families.plain import PlainVllm
from benchmarks.families.table import FAMILIES, family_named
from gpupoold.checkpoints.parsers import ChatFormat, find_reasoning_parser, find_tool_parser
from gpupoold.wire.channel import ChannelClosed

_ROOT = Path(__file__).resolve().parent.parent
RESULTS = _ROOT / "benchmarks" / "results" / "models" / "families.json"
GROUP_SIZES = (2, 4)
PAGE = _ROOT / "docs" / "models.md"
_FAMILIES_PER_GROUP = 6
# Families that complete a small group, so that its models do not fit on the device together.
_FILLERS = ("mistral", "phi3", "granite", "olmo2")


def check_families(
    families: Sequence[Family], folder: Path, num_gpus: int = 1
) -> Iterator[tuple[str, Cells, float]]:
    """Yield each family's cells, and its share of the time in seconds.

    A worker that dies ends its group; then each family of the group is checked alone.
    """
    for group in _groups(families):
        started_s = time.monotonic()
        cells = _check_group(group, folder, num_gpus)
        wall_s = (time.monotonic() - started_s) / len(group)
        for family in group:
            yield family.name, cells[family.name], wall_s


def _check_group(group: Sequence[Family], folder: Path, num_gpus: int) -> dict[str, Cells]:
    names = {family.name for family in group}
    missing = max(0, len(_FILLERS) - len(group))
    fillers = [family_named(name) for name in _FILLERS if name not in names][:missing]
    with PlainVllm(folder / f"{group[0].name}.log", num_gpus) as plain:
        families = {family: make_family(family, folder) for family in (*group, *fillers)}
        check = GroupCheck(families, plain, num_gpus)
        try:
            check.run(folder / f"{group[0].name}.log")
        except (ChannelClosed, TimeoutError, AssertionError) as error:
            if len(group) > 1:
                return {
                    name: cells
                    for family in group
                    for name, cells in _check_group([family], folder, num_gpus).items()
                }
            _set_missing(check.cells[group[0].name], f"the worker died: {error}")
    return check.cells


def _set_missing(cells: Cells, reason: str) -> None:
    for column in ("serve", "switch", "kv", "migrate", "resume"):
        cells.setdefault(column, Cell(Outcome.NO, reason[:300]))


def _parsers(family: Family) -> Cell:
    """Return the parsers that gpupool finds with the family's real chat template.

    The tiny tokenizer has no special tokens of the family, so the template's text stands for these.
    """
    if not family.generates:
        return Cell(Outcome.UNTRIED)
    if not family.template:
        return Cell(Outcome.UNTRIED, "no template at hand")
    template = (TEMPLATES / f"{family.template}.jinja").read_text()
    chat = ChatFormat(
        architectures=(family.architecture,),
        model_types=(family.model_type,),
        template=template,
        has_token=lambda token: token in template,
        has_module=lambda name: find_spec(name) is not None,
    )
    tool, reasoning = find_tool_parser(chat).name, find_reasoning_parser(chat).name
    return Cell(Outcome.YES, f"tools: {tool or 'none'}, reasoning: {reasoning or 'none'}")


def _groups(families: Sequence[Family]) -> Iterator[Sequence[Family]]:
    for start in range(0, len(families), _FAMILIES_PER_GROUP):
        yield families[start : start + _FAMILIES_PER_GROUP]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.models", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="check these families")
    parser.add_argument("--missing", action="store_true", help="check families without results")
    parser.add_argument("--folder", type=Path, default=_ROOT / "build" / "families")
    parser.add_argument("--page-only", action="store_true", help="generate the page again")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of each device")
    args = parser.parse_args(argv)
    results = RESULTS if args.gpus == 1 else group_results(args.gpus)
    rows = read_rows(results)
    if not args.page_only:
        rows = _check(args, rows, results)
    PAGE.write_text(current_page())
    failed = [name for name, row in rows.items() if row.has_failed]
    print(f"{results}: {len(rows)} families, {len(failed)} with a failure", flush=True)
    return 1 if failed else 0


def group_results(num_gpus: int) -> Path:
    """Return the results file of groups of a size."""
    return RESULTS.with_name(f"groups-{num_gpus}.json")


def current_page() -> str:
    """Return the page of the results that are kept now."""
    of_groups = {size: read_rows(group_results(size)) for size in GROUP_SIZES}
    return page_text(FAMILIES, read_rows(RESULTS), of_groups)


def _check(args: argparse.Namespace, rows: dict[str, Row], results: Path) -> dict[str, Row]:
    """Check the chosen families, and keep each result at once."""
    chosen = [family_named(name) for name in args.only] if args.only else list(FAMILIES)
    if args.missing:
        chosen = [family for family in chosen if family.name not in rows]
    args.folder.mkdir(parents=True, exist_ok=True)
    today = datetime.now(UTC).date().isoformat()
    for name, cells, wall_s in check_families(chosen, args.folder, args.gpus):
        cells["parsers"] = _parsers(family_named(name))
        rows[name] = Row(cells=cells, measured_on=today, wall_s=round(wall_s, 1))
        write_rows(results, rows)
        shown = ", ".join(
            f"{column} {cell.outcome} ({cell.text})" for column, cell in cells.items()
        )
        print(f"{name}: {shown}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
