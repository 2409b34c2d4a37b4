"""Cells of the table of families, and the file that keeps them between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

COLUMNS = ("serve", "switch", "kv", "migrate", "resume", "parsers")


class Outcome(StrEnum):
    """The result of one check of one family."""

    YES = "yes"
    NO = "no"
    VLLM_CANNOT = "vllm_cannot"
    UNTRIED = "untried"


class Cell(msgspec.Struct, frozen=True):
    """An outcome with its details: figures, or the reason."""

    outcome: Outcome
    text: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The cells of a family by column, the date of the run and its duration in seconds."""

    cells: dict[str, Cell]
    measured_on: str
    wall_s: float


def read_rows(path: Path) -> dict[str, Row]:
    """Return the rows of a results file by family; none if there is no file."""
    if not path.exists():
        return {}
    rows: dict[str, Row] = msgspec.json.decode(path.read_bytes(), type=dict[str, Row])
    return rows


def write_rows(path: Path, rows: Mapping[str, Row]) -> None:
    """Replace the results file."""
    text = json.dumps(msgspec.to_builtins(dict(rows)), indent=2, sort_keys=True)
    scratch = path.with_suffix(".new")
    scratch.write_text(text + "\n")
    scratch.replace(path)
