"""Token ids to answer with where no engine makes any."""

from __future__ import annotations

import zlib
from typing import NamedTuple, Self

# Ordinary pieces of words in all common vocabularies: past the control tokens and single
# bytes, before what is rare.
_FIRST, _END = 1300, 2000
_STRIDE = 37


class Vocabulary(NamedTuple):
    """The ids from ``first`` to before ``end``, without special ones."""

    first: int
    end: int

    @classmethod
    def of_size(cls, vocab_size: int) -> Self:
        """Return the vocabulary of a model with that many ids (0: unknown)."""
        if vocab_size >= _END or vocab_size <= 0:
            return cls(_FIRST, _END)
        return cls(vocab_size // 2, max(vocab_size // 2 + 1, vocab_size * 3 // 4))

    def token_ids(self, seed: int, start: int, count: int) -> list[int]:
        """The answer's tokens number ``start`` (from 0) and after; the same for a seed."""
        size = self.end - self.first
        return [self.first + (seed + i * _STRIDE) % size for i in range(start, start + count)]


def seed_of(request_id: str) -> int:
    """The same in every process."""
    return zlib.crc32(request_id.encode())
