"""The results of a run: a JSON object that grows piece by piece. Pure, except for one write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import Figure, derived
from benchmarks.values import value_text

FORMAT = 1
DONE, FAILED, TIMED_OUT = "done", "failed", "timed out"
NO_TIME, NOT_ASKED_FOR, SKIPPED = "no time left", "not asked for", "skipped"


def begin(facts: Mapping[str, Any], *, is_dry: bool) -> dict[str, Any]:
    """Results without a piece. ``facts`` are hardware, versions, commit and when it was."""
    return {"format": FORMAT, "is_dry_run": is_dry, **facts, "pieces": {}, "derived": {}}


def with_piece(
    results: Mapping[str, Any],
    name: str,
    outcome: str,
    *,
    seconds: float = 0.0,
    limit_s: float | None = None,
    problem: str = "",
    report: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Results with one piece more, and with what follows from all there are."""
    report = report or {}
    piece = {
        "outcome": outcome,
        "seconds": seconds,
        "limit_s": limit_s,
        "problem": problem,
        "figures": report.get("figures", {}),
        "details": report.get("details", {}),
    }
    grown = {**results, "pieces": {**results["pieces"], name: piece}}
    return grown | {"derived": derived(figures_of(grown))}


def figures_of(results: Mapping[str, Any]) -> dict[str, Figure]:
    """All figures of the pieces, by name."""
    pieces = results["pieces"].values()
    return {name: figure for piece in pieces for name, figure in piece["figures"].items()}


def has_failed(results: Mapping[str, Any]) -> bool:
    """Return whether a piece that was begun did not come to its end."""
    return any(piece["outcome"] in (FAILED, TIMED_OUT) for piece in results["pieces"].values())


def write(path: Path, results: Mapping[str, Any]) -> None:
    """All of it or what was there before."""
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    os.replace(scratch, path)


def table(results: Mapping[str, Any]) -> Iterator[str]:
    """What a person reads at the end: pieces, then figures beside their limits."""
    for name, piece in results["pieces"].items():
        problem = f"  {piece['problem']}" if piece["problem"] else ""
        yield f"{name:<24}{piece['outcome']:<14}{piece['seconds']:7.1f} s{problem}".rstrip()
    yield "\nA dry run: its figures mean nothing.\n" if results["is_dry_run"] else ""
    found = figures_of(results) | results["derived"]
    width = max(map(len, found), default=0)
    for name, figure in found.items():
        limit = "" if figure["limit"] is None else value_text(name, figure["limit"])
        mark = "MISSED" if figure["reached"] is False else ""
        measured = value_text(name, figure["measured"])
        yield f"{name:<{width}}{measured:>14}{limit:>14}  {mark}".rstrip()
