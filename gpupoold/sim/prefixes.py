"""KV of ended requests in the host memory of a simulated box, for later turns of conversations.

As on the real box, the copies fill what KV of live requests leaves, the least recently used go
first, and every device finds them. A conversation stands for its blocks: it is evicted as a whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from gpupoold.sim.workloads import SimRequest

BLOCK_TOKENS = 16


class SimPrefixes:
    """The conversations whose KV is kept, by model and name."""

    def __init__(
        self, kv_bytes_per_token: Mapping[str, int], budget_bytes: Callable[[], float]
    ) -> None:
        """``budget_bytes`` returns the memory that is left for the copies at the moment."""
        self._bytes_per_token = kv_bytes_per_token
        self._budget_bytes = budget_bytes
        self._kept: OrderedDict[tuple[str, str], int] = OrderedDict()  # tokens
        self.used_bytes = 0
        self.num_hit_tokens = 0

    def find(self, request: SimRequest) -> int:
        """Return the tokens of a prompt whose KV is kept, in whole blocks; never the last token."""
        key = request.model, request.conversation
        kept = self._kept.get(key) if request.conversation else None
        if kept is None:
            return 0
        self._kept.move_to_end(key)
        known = min(kept, request.history_tokens, request.prompt_tokens - 1)
        known -= known % BLOCK_TOKENS
        self.num_hit_tokens += known
        return known

    def keep(self, request: SimRequest, context_tokens: int) -> None:
        """Keep the KV of an ended request; older conversations make room."""
        if not request.conversation:
            return
        key = request.model, request.conversation
        self._drop(key)
        self._kept[key] = context_tokens
        self.used_bytes += context_tokens * self._bytes_per_token[request.model]
        budget_bytes = self._budget_bytes()
        while self._kept and self.used_bytes > budget_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[str, str]) -> None:
        tokens = self._kept.pop(key, 0)
        self.used_bytes -= tokens * self._bytes_per_token[key[0]]
