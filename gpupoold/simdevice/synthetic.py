"""Synthetic token ids for the answers of simulated devices."""

from __future__ import annotations

import zlib
from typing import NamedTuple, Self

# Ids of common word pieces in all usual vocabularies: after control tokens and single bytes,
# before rare tokens.
_FIRST, _END = 1300, 2000
_STRIDE = 37


class Vocabulary(NamedTuple):
    """Token ids from ``first`` to before ``end``, without special tokens."""

    first: int
    end: int

    @classmethod
    def of_size(cls, vocab_size: int) -> Self:
        """Return the vocabulary of a model with ``vocab_size`` ids (0: unknown)."""
        if vocab_size >= _END or vocab_size <= 0:
            return cls(_FIRST, _END)
        return cls(vocab_size // 2, max(vocab_size // 2 + 1, vocab_size * 3 // 4))

    def token_ids(self, seed: int, start: int, count: int) -> list[int]:
        """Return ``count`` tokens of an answer from token ``start`` (from 0), fixed by ``seed``."""
        size = self.end - self.first
        return [self.first + (seed + i * _STRIDE) % size for i in range(start, start + count)]


def seed_of(request_id: str) -> int:
    """Return a seed for a request: the same in every process, unlike ``hash``."""
    return zlib.crc32(request_id.encode())
