"""Counted use of the rates of an API key."""

from __future__ import annotations

from typing import NamedTuple


class RateUse(NamedTuple):
    """Numbers of begun requests, and of tokens of prompts and answers."""

    num_requests: int = 0
    num_tokens: int = 0

    def __add__(self, other: RateUse) -> RateUse:  # type: ignore[override]
        return RateUse(self.num_requests + other.num_requests, self.num_tokens + other.num_tokens)

    def __sub__(self, other: RateUse) -> RateUse:
        return RateUse(self.num_requests - other.num_requests, self.num_tokens - other.num_tokens)
