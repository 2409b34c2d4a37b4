"""Lengths of prompts and answers: samplers over measured lengths.

The random number generator belongs to the caller, so that a seed reproduces a run.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from gpupoold.errors import UsageError
from gpupoold.sim.csv_table import CsvTable, read_package_table

PROMPT, OUTPUT, QUANTILE = "prompt_tokens", "output_tokens", "quantile"
SHAREGPT_TABLE = "sharegpt_lengths.csv"
# Variants of a workload as the Aegaeon paper names them: factors on prompts and outputs.
VARIANTS: dict[str, tuple[int, int]] = {"ix1": (1, 1), "ix2": (2, 1), "ox2": (1, 2)}


class Lengths(NamedTuple):
    """Tokens of one request; both at least 1."""

    prompt_tokens: int
    output_tokens: int


class LengthSource(Protocol):
    """A source of prompt and answer lengths."""

    def sample(self, rng: Random) -> Lengths:
        """Return the lengths of one more request."""
        ...


class LengthSampler:
    """Draws whole (prompt, output) pairs, each equally likely."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Raise UsageError without pairs or for a length below 1."""
        if not pairs:
            raise UsageError("no token lengths to draw from")
        for pair in pairs:
            if min(pair) < 1:
                raise UsageError(f"token lengths {pair}: both must be at least 1")
        self._pairs = [Lengths(*pair) for pair in pairs]

    def __len__(self) -> int:
        return len(self._pairs)

    def sample(self, rng: Random) -> Lengths:
        return rng.choice(self._pairs)


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

    Raises:
        UsageError: the message names the file, line and column of the error.
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
