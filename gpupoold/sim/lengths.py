"""Lengths of prompts and answers: samplers over measured lengths.

The random number generator belongs to the caller, so that a seed reproduces a run.
"""

from __future__ import annotations

import bisect
import csv
import functools
import gzip
import io
import itertools
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

from gpupoold.errors import UsageError

PROMPT, OUTPUT, QUANTILE = "prompt_tokens", "output_tokens", "quantile"
SHAREGPT_TABLE = "sharegpt_lengths.csv"
# Variants of a workload as the Aegaeon paper names them: factors on prompts and outputs.
VARIANTS: dict[str, tuple[int, int]] = {"ix1": (1, 1), "ix2": (2, 1), "ox2": (1, 2)}

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_COUNT = re.compile(r"[+-]?\d{1,15}", re.ASCII)
_MAX_LISTED = 20
SCENARIO = "scenario"


class Lengths(NamedTuple):
    """Tokens of one request, both at least 1; as a source, of every request."""

    prompt_tokens: int
    output_tokens: int

    def sample(self, rng: Random) -> Lengths:
        return self


class LengthSource(Protocol):
    """A source of prompt and answer lengths."""

    def sample(self, rng: Random) -> Lengths:
        """Return the lengths of one more request."""
        ...


@dataclass(frozen=True, slots=True)
class QuantileSampler:
    """Draws prompt and output lengths independently from two distributions given by quantiles.

    ``prompt_tokens[i]`` and ``output_tokens[i]`` belong to ``quantiles[i]``; ``quantiles`` rise
    from 0 to 1. Between two quantiles lengths are uniform.
    """

    quantiles: Sequence[float]
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]

    def __post_init__(self) -> None:
        ends = (self.quantiles[0], self.quantiles[-1])
        rising = all(one < other for one, other in itertools.pairwise(self.quantiles))
        if ends != (0.0, 1.0) or not rising:
            raise ValueError("quantiles must rise from 0 to 1")

    def sample(self, rng: Random) -> Lengths:
        """Return a prompt and an output length, each from its own distribution."""
        return Lengths(self._draw(rng, self.prompt_tokens), self._draw(rng, self.output_tokens))

    def _draw(self, rng: Random, values: Sequence[int]) -> int:
        share = rng.random()
        right = bisect.bisect_right(self.quantiles, share)
        below, above = self.quantiles[right - 1], self.quantiles[right]
        step = (share - below) / (above - below)
        return round(values[right - 1] + step * (values[right] - values[right - 1]))


@dataclass(frozen=True, slots=True)
class ScaledLengths:
    """Lengths of ``source``, multiplied by whole factors."""

    source: LengthSource
    prompt_factor: int = 1
    output_factor: int = 1

    def sample(self, rng: Random) -> Lengths:
        """Return lengths of the source, multiplied."""
        prompt, output = self.source.sample(rng)
        return Lengths(prompt * self.prompt_factor, output * self.output_factor)


def length_variant(source: LengthSource, name: str) -> LengthSource:
    """Return ``ix2``: prompts doubled; ``ox2``: outputs doubled; ``ix1``: unchanged."""
    if name not in VARIANTS:
        raise UsageError(f"no length variant {name!r}", f"use one of {', '.join(VARIANTS)}")
    return ScaledLengths(source, *VARIANTS[name])


def length_pairs(table: CsvTable) -> list[Lengths]:
    """Return all (prompt, output) pairs of a table.

    Raises UsageError; the message names the file, line and column of the error.
    """
    table.require(PROMPT, OUTPUT)
    return [Lengths(table.count(row, PROMPT), table.count(row, OUTPUT)) for row in table.rows]


@functools.cache
def sharegpt_lengths() -> QuantileSampler:
    """Return the built-in lengths: single-turn ShareGPT conversations, prompt and output
    independent.
    """
    table = read_package_table(SHAREGPT_TABLE)
    pairs = length_pairs(table)
    return QuantileSampler(
        tuple(table.number(row, QUANTILE) for row in table.rows),
        tuple(pair.prompt_tokens for pair in pairs),
        tuple(pair.output_tokens for pair in pairs),
    )


@dataclass(frozen=True, slots=True)
class CsvRow:
    """A line of a table; ``line`` counts from 1.

    All inputs of the simulator are read here. Files may be gzipped (``.gz``); empty lines and lines
    that begin with ``#`` are skipped.
    """

    line: int
    cells: list[str]


@dataclass(frozen=True, slots=True)
class CsvTable:
    """A CSV file: rows, and the index of each column; ``name`` is the file's name in messages."""

    name: str
    columns: dict[str, int]
    header_line: int
    rows: list[CsvRow]

    def require(self, *columns: str) -> None:
        """Raise UsageError unless the table has all ``columns``."""
        missing = [column for column in columns if column not in self.columns]
        if missing:
            raise UsageError(
                f"{self.name}: line {self.header_line}: no column {', '.join(missing)}",
                f"the columns are {', '.join(self.columns)}",
            )

    def text(self, row: CsvRow, column: str) -> str:
        """Return the cell without surrounding space. Raises UsageError if empty."""
        cell = self.maybe_text(row, column)
        if not cell:
            raise self.error(row, column, "empty")
        return cell

    def maybe_text(self, row: CsvRow, column: str) -> str:
        """Return the cell without surrounding space; it may be empty, or the column missing."""
        return row.cells[self.columns[column]].strip() if column in self.columns else ""

    def number(self, row: CsvRow, column: str) -> float:
        """Return the cell as a finite number >= 0. Raises UsageError otherwise."""
        cell = self.text(row, column)
        value = float(cell) if _NUMBER.fullmatch(cell) else math.nan
        if not math.isfinite(value):
            raise self.error(row, column, f"{cell!r} is not a number")
        if value < 0:
            raise self.error(row, column, f"{cell} is negative")
        return value

    def count(self, row: CsvRow, column: str) -> int:
        """Return the cell as a whole number >= 1. Raises UsageError otherwise."""
        cell = self.text(row, column)
        if not _COUNT.fullmatch(cell):
            raise self.error(row, column, f"{cell!r} is not a whole number")
        if (value := int(cell)) < 1:
            raise self.error(row, column, f"{cell} is less than 1")
        return value

    def error(self, row: CsvRow, column: str, problem: str) -> UsageError:
        """Return an error with the file, line and column of a cell."""
        return UsageError(f"{self.name}: line {row.line}, column {column}: {problem}")


def read_table(path: Path) -> CsvTable:
    """Read a ``.csv`` or ``.csv.gz`` file. Raises UsageError if unreadable or malformed."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot be read: {reason}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
    return parse_table(io.StringIO(text, newline=""), str(path))


def read_package_table(name: str) -> CsvTable:
    """Read a table from this package's folder ``data``."""
    text = (resources.files("gpupoold.sim") / "data" / name).read_text(encoding="utf-8")
    return parse_table(io.StringIO(text, newline=""), name)


def parse_table(lines: Iterable[str], name: str) -> CsvTable:
    """Parse ``lines``; ``name`` appears in messages. Raises UsageError for a malformed table."""
    rows = _rows(lines, name)
    header = next(rows, None)
    if header is None:
        raise UsageError(f"{name}: empty, expected a header line with the column names")
    names = [" ".join(cell.split()) for cell in header.cells]
    columns = {column: index for index, column in enumerate(names)}
    if len(columns) < len(names):
        repeated = next(column for column in names if names.count(column) > 1)
        raise UsageError(f"{name}: line {header.line}: column {repeated!r} appears twice")
    table = CsvTable(name, columns, header.line, [])
    for row in rows:
        if len(row.cells) != len(names):
            problem = f"{len(row.cells)} cells, expected {len(names)}"
            raise UsageError(f"{name}: line {row.line}: {problem}")
        table.rows.append(row)
    return table


def select_scenario(table: CsvTable, scenario: str | None) -> CsvTable:
    """Return the rows of one scenario.

    Without a name, returns the whole table if its rows have at most one scenario. Raises UsageError
    if the scenario or its column is missing, or several scenarios need a name.
    """
    if SCENARIO not in table.columns:
        if scenario is not None:
            raise UsageError(f"{table.name}: no column {SCENARIO}, so no scenario {scenario!r}")
        return table
    by_name: dict[str, list[CsvRow]] = {}
    for row in table.rows:
        by_name.setdefault(table.text(row, SCENARIO), []).append(row)
    if scenario is None and len(by_name) <= 1:
        return table
    if scenario not in by_name:
        problem = f"no scenario {scenario!r}" if scenario else "several scenarios, name one"
        raise UsageError(f"{table.name}: {problem}", f"known: {_listed(by_name)}")
    return replace(table, rows=by_name[scenario])


def _rows(lines: Iterable[str], name: str) -> Iterator[CsvRow]:
    """Yield non-empty rows; comments become empty lines, so that line numbers stay right."""
    reader = csv.reader("\n" if line.startswith("#") else line for line in lines)
    try:
        for cells in reader:
            if cells:
                yield CsvRow(reader.line_num, cells)
    except csv.Error as error:
        raise UsageError(f"{name}: line {reader.line_num}: {error}") from error


def _listed(names: Iterable[str]) -> str:
    ordered = [" ".join(name.split()) for name in names]
    more = len(ordered) - _MAX_LISTED
    return ", ".join(ordered[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
