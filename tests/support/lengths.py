"""Lengths of requests, drawn from given pairs."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from gpupoold.sim.lengths import Lengths


class PairLengths(NamedTuple):
    """Pairs of prompt and answer, each equally likely."""

    pairs: Sequence[tuple[int, int]]

    def sample(self, rng: Random) -> Lengths:
        return Lengths(*rng.choice(self.pairs))
