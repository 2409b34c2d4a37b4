"""Paused requests of several models in one slab allocator, as a host cache sees them.

Requests have ShareGPT lengths and a model at random. In each turn one model's requests are
taken out of the cache, decode some tokens, and go back in; those that have ended are replaced
by new ones, so that what all of them want stays near ``fill`` of the budget. This goes on until
every request of the start has long ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import mean
from typing import NamedTuple

from gpupoold.memory.slabs import Allocation, SlabAllocator
from gpupoold.sim.lengths import sharegpt_lengths

BLOCK_TOKENS = 16
# KV per token in 16 bit (Aegaeon, Table 1): Qwen-7B, InternLM2.5-7B, LLaMA-13B, Qwen-72B.
TABLE_1_TOKEN_BYTES = tuple(kib << 10 for kib in (512, 128, 800, 2560))
# The same and those of eight smaller models or of models with fewer KV heads.
TWELVE_TOKEN_BYTES = TABLE_1_TOKEN_BYTES + tuple(
    kib << 10 for kib in (12, 28, 36, 56, 112, 144, 192, 256)
)
_TURN_TOKENS = (20, 160)


@dataclass(eq=False)
class Request:
    """A request of ``model``; ``kept`` while it is paused."""

    model: int
    num_tokens: int
    num_left: int
    kept: Allocation | None = None

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // BLOCK_TOKENS)


@dataclass(frozen=True)
class MixResult:
    """Means over the turns of the steady state, and counts over all turns."""

    used_share: float
    """Bytes in blocks over the budget."""
    fragmentation: float
    """Share of the bytes in slabs that no block in use has."""
    worst_fragmentation: float
    num_extents: float
    """Of one allocation."""
    num_refused: int


class ShapeUse(NamedTuple):
    """One shape's use of the buffer."""

    block_bytes: int
    num_slabs: int
    num_blocks: int  # in the shape's slabs, used or not
    num_used: int


def shapes_of(slabs: SlabAllocator) -> list[ShapeUse]:
    """Shapes with slabs, smallest blocks first."""
    return [
        ShapeUse(size, len(one.slabs), one.num_blocks, one.num_used)
        for size, one in sorted(slabs._shapes.items())
    ]


class KvMix:
    """``models_per_shape`` models of each shape over ``allocator``."""

    def __init__(
        self,
        allocator: SlabAllocator,
        fill: float,
        token_bytes: tuple[int, ...] = TABLE_1_TOKEN_BYTES,
        models_per_shape: int = 10,
        seed: int = 1,
    ) -> None:
        self.allocator = allocator
        self._wanted_bytes = fill * allocator.num_bytes
        self._block_bytes = [BLOCK_TOKENS * size for size in token_bytes] * models_per_shape
        self._rng = Random(seed)
        self._requests: list[Request] = []
        self._num_extents: list[int] = []
        self.num_refused = 0

    def play(self, num_turns: int = 1000, num_warmup: int = 500) -> MixResult:
        used, fragmentation = [], []
        for turn in range(num_turns):
            self._turn()
            if turn >= num_warmup:
                at = self.allocator
                used.append(at.used_bytes / at.num_bytes)
                fragmentation.append(1 - at.used_bytes / at.reserved_bytes)
        self.allocator.check_integrity()
        return MixResult(
            mean(used),
            mean(fragmentation),
            max(fragmentation),
            mean(self._num_extents),
            self.num_refused,
        )

    def stop(self) -> None:
        """All requests end."""
        for request in self._requests:
            self._take_out(request)
        self._requests.clear()

    def _turn(self) -> None:
        model = self._rng.randrange(len(self._block_bytes))
        running = [one for one in self._requests if one.model == model]
        num_tokens = self._rng.randint(*_TURN_TOKENS)
        for request in running:
            self._take_out(request)
            step = min(num_tokens, request.num_left)
            request.num_tokens += step
            request.num_left -= step
        self._requests = [one for one in self._requests if one.num_left]
        arrived = self._arrivals()
        self._requests += arrived
        for request in [*(one for one in running if one.num_left), *arrived]:
            self._put_in(request)

    def _arrivals(self) -> list[Request]:
        arrived = []
        missing = self._wanted_bytes - sum(
            one.num_blocks * self._block_bytes[one.model] for one in self._requests
        )
        while missing > 0:
            lengths = sharegpt_lengths().sample(self._rng)
            model = self._rng.randrange(len(self._block_bytes))
            arrived.append(Request(model, lengths.prompt_tokens, lengths.output_tokens))
            missing -= arrived[-1].num_blocks * self._block_bytes[model]
        return arrived

    def _put_in(self, request: Request) -> None:
        """A request that the cache has no room for goes away, as if it ran to its end."""
        request.kept = self.allocator.allocate(self._block_bytes[request.model], request.num_blocks)
        if request.kept is None:
            self.num_refused += 1
            self._requests.remove(request)
        else:
            self._num_extents.append(len(request.kept.extents))

    def _take_out(self, request: Request) -> None:
        if request.kept is not None:
            self.allocator.free(request.kept)
            request.kept = None
