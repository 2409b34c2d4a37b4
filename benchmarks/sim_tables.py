"""Write the figures of ``benchmarks/sim.py`` into pages of ``docs`` as tables.

    python -m benchmarks.sim_tables build/bench-sim.json

The text between a comment with a table's name and an end mark is replaced. All numbers come from
the JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers import PAPERS
from benchmarks.sim import OTHERS
from gpupoold.errors import UsageError
from gpupoold.sim.policies import POLICY_NAMES
from gpupoold.sim.presets import preset_panels

Report = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]

_DOCS = Path(__file__).resolve().parent.parent / "docs" / "internals"
_PAGES = (_DOCS / "scheduling.md", _DOCS / "papers.md")
_MARKED = re.compile(r"<!-- bench-sim: (?P<name>[\w-]+) -->\n(?P<old>.*?)<!-- end -->", re.DOTALL)
_BEGIN = "<!-- bench-sim:"


def main() -> int:
    """Rewrite the pages; exit code 2 when the report or a page is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("report", type=Path, help="what `make bench-sim` wrote")
    parser.add_argument("--page", type=Path, action="append", help="default: the pages of docs")
    arguments = parser.parse_args()
    for page in arguments.page or _PAGES:
        try:
            report = json.loads(arguments.report.read_text("utf-8"))
            before = page.read_text("utf-8")
            after = rewritten(before, report)
        except (UsageError, OSError, ValueError) as error:
            print(f"error: {arguments.report}, {page}: {error}", file=sys.stderr)
            return 2
        if after != before:
            page.write_text(after, "utf-8")
        print(f"{page}: {'rewritten' if after != before else 'unchanged'}")
    return 0


def rewritten(page: str, report: Report) -> str:
    """The page with all its tables as the report has them.

    Raises:
        UsageError: no such table, a table without an end, or a report without its numbers.
    """
    names = [match["name"] for match in _MARKED.finditer(page)]
    if len(names) != page.count(_BEGIN):
        raise UsageError(f"{page.count(_BEGIN)} tables begin in the page, {len(names)} of them end")
    if any(_BEGIN in match["old"] for match in _MARKED.finditer(page)):
        raise UsageError("a table of the page begins before the one above it has ended")
    tables = {name: table(name, report) for name in names}
    return _MARKED.sub(
        lambda m: f"{_BEGIN} {m['name']} -->\n\n{tables[m['name']]}\n<!-- end -->", page
    )


def table(name: str, report: Report) -> str:
    """One table in Markdown. Raises UsageError as :func:`rewritten` does."""
    if name not in TABLES:
        raise UsageError(f"no table is named {name!r}; known: {', '.join(TABLES)}")
    try:
        return TABLES[name](report)
    except KeyError as error:
        raise UsageError(f"the report has no {error}, which the table {name!r} needs") from None


def figures_table(report: Report) -> str:
    """What was asked for beside what came out."""
    lines = [
        (one["figure"], _plain(one["asked"]), _plain(one["measured"]), _reached(one))
        for one in report["figures"]
    ]
    return _markdown(("figure", "asked for", "measured", ""), lines)


def goodput_table(report: Report) -> str:
    """The load at 90 % attainment, by preset and policy."""
    axes = {row["preset"]: row["axis"] for row in report["rows"]}
    loads = report["goodput"]
    policies = _known(name for by_policy in loads.values() for name in by_policy)
    lines = []
    for preset, by_policy in loads.items():
        axis = axes[preset]
        cells = [_load(by_policy, policy, axis) for policy in policies]
        lines.append((f"`{preset}`", "models" if axis == "models" else "rps", *cells))
    return _markdown(("preset", "load in", *policies), lines)


def recorded_table(report: Report) -> str:
    """Attainment on each recorded workload."""
    recorded = {panel.name for panel in preset_panels("real-traces")}
    return _attainments(row for row in report["rows"] if row["preset"] in recorded)


def others_table(report: Report) -> str:
    """Attainment, and the share of first tokens in time, on presets of this project."""
    others = {panel.name for name in OTHERS for panel in preset_panels(name)}
    points: dict[tuple[str, float], dict[str, Mapping[str, Any]]] = {}
    for row in report["rows"]:
        if row["preset"] in others:
            points.setdefault((row["preset"], row["rps"]), {})[row["policy"]] = row
    policies = _known(name for point in points.values() for name in point)
    lines = []
    for (preset, rps), point in points.items():
        some = next(iter(point.values()))
        cells = [_both(point.get(policy)) for policy in policies]
        lines.append((f"`{preset}`", some["devices"], f"{rps:.3g}", *cells, _bound(some)))
    return _markdown(("preset", "box", "rps", *policies, "bound"), lines)


def papers_table(paper: str) -> Callable[[Report], str]:
    """Return the table of a paper's figures beside ours."""

    def table_of(report: Report) -> str:
        lines = [
            (one["figure"], one["quantity"], one["published"], one["ours"] or "-", one["why"])
            for one in report["papers"]
            if one["paper"] == paper
        ]
        return _markdown(("figure", "quantity", "published", "here", "remark"), lines)

    return table_of


def fig6_table(report: Report) -> str:
    """The three ways to share devices between prompts and answers."""
    lines = [
        (
            f"`{row['policy']}`",
            _attained(row),
            _seconds(row["ttft_p50_s"]),
            _seconds(row["ttft_p99_s"]),
            str(row["switches"]),
        )
        for row in report["rows"]
        if row["preset"] == "aegaeon-fig6"
    ]
    return _markdown(("policy", "attainment", "TTFT p50", "TTFT p99", "switches"), lines)


def sweep_table(report: Report) -> str:
    """The two halves of the sweep: losses, and each policy's mean attainment."""
    policies = _known(name for half in report["sweep"] for name in half["attainment"])
    lines = [
        (
            half["draws"],
            str(half["num_draws"]),
            str(half["num_losses"]),
            f"{half['worst_points']:.1f}",
            *(
                "" if share is None else _percent(share)
                for share in map(half["attainment"].get, policies)
            ),
        )
        for half in report["sweep"]
    ]
    return _markdown(("draws", "number", "lost", "worst, points", *policies), lines)


TABLES: Mapping[str, Callable[[Report], str]] = {
    "figures": figures_table,
    "goodput": goodput_table,
    "recorded": recorded_table,
    "fig6": fig6_table,
    "others": others_table,
    "sweep": sweep_table,
    **{f"papers-{name.lower()}": papers_table(name) for name in PAPERS},
}


def _attainments(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line per preset, one column per policy."""
    points: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        points.setdefault(row["preset"], {})[row["policy"]] = row
    policies = _known(name for point in points.values() for name in point)
    lines = []
    for preset, point in points.items():
        some = next(iter(point.values()))
        cells = [_attained(point.get(policy)) for policy in policies]
        cells.append(_bound(some))
        lines.append((f"`{preset}`", some["devices"], str(some["models"]), *cells))
    if not lines:
        return "Not measured: the recorded workloads were not there.\n"
    return _markdown(("workload", "box", "models", *policies, "bound"), lines)


def _known(names: Iterable[str]) -> list[str]:
    """These policies, in the usual order."""
    there = set(names)
    return [name for name in POLICY_NAMES if name in there]


def _load(by_policy: Mapping[str, Any], policy: str, axis: str) -> str:
    if policy not in by_policy:
        return ""
    best = by_policy[policy]
    if best is None:
        return "none"
    load = f"{best['load']:.0f}" if axis == "models" else f"{best['load']:.2f}"
    return f"≥ {load}" if best["is_lower_bound"] else load


def _attained(row: Mapping[str, Any] | None, metric: str = "attainment") -> str:
    """A share in percent; empty where nothing was run."""
    if row is None:
        return ""
    if row.get("refused"):
        return "refused"
    return "none" if row[metric] is None else _percent(row[metric])


def _bound(row: Mapping[str, Any]) -> str:
    """Return the bound on the attainment of all policies on the row's workload."""
    share = row["attainment_bound"]
    return "none" if share is None else _percent(share)


def _both(row: Mapping[str, Any] | None) -> str:
    """Tokens in time, and first tokens in time."""
    if row is None or row.get("refused"):
        return _attained(row)
    return f"{_attained(row)}, {_attained(row, 'ttft_attainment')}"


def _reached(figure: Mapping[str, Any]) -> str:
    return "" if figure["reached"] else "missed"


def _plain(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f} s"


def _markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    ruled = [heads, ["-"] * len(heads), *lines]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in ruled)


if __name__ == "__main__":
    sys.exit(main())
