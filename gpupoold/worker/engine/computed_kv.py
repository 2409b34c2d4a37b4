"""The blocks of a request that its next tokens need, for every kind of KV cache group.

vLLM keeps one table of blocks per *KV cache group* and request: entry ``i`` has tokens ``i * size``
to ``(i + 1) * size - 1``, where ``size`` is the group's block size. Which entries are needed after
``num_tokens`` computed tokens depends on the group:

- full attention and MLA: all entries, the last one perhaps unfinished;
- sliding window, chunked local attention: the entries of the window, earlier ones are null blocks;
- state (Mamba, Gated DeltaNet, short convolutions): the entry of the last token, whose block has
  the state after exactly ``num_tokens`` tokens.

vLLM's managers of the groups compute the number of entries that are not needed. ``managers`` are
``KVCacheCoordinator.single_type_managers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_NULL_BLOCK = 0


class ComputedKv(NamedTuple):
    """The blocks with KV and state of the first ``num_tokens`` tokens, group by group."""

    blocks: list[int]
    num_tokens: int


def spans(managers: Sequence[Any], num_tokens: int) -> list[range]:
    """Return for each group the needed entries of a request's table."""
    return [
        range(
            min(manager.get_num_skipped_tokens(num_tokens), num_tokens) // manager.block_size,
            -(-num_tokens // manager.block_size),
        )
        for manager in managers
    ]


def take(managers: Sequence[Any], tables: Sequence[list[int]], num_tokens: int) -> list[int]:
    """Return the needed blocks of a request; none if a table has other entries than expected.

    With speculative decoding, the block of a state depends on the accepted tokens.
    """
    if any(getattr(manager, "num_speculative_blocks", 0) for manager in managers):
        return []
    blocks: list[int] = []
    for table, span in zip(tables, spans(managers, num_tokens), strict=True):
        needed = table[span.start : span.stop]
        if len(needed) < len(span) or _NULL_BLOCK in needed:
            return []
        blocks += needed
    return blocks


def put(
    managers: Sequence[Any], request_id: str, entries: Sequence[range], blocks: Sequence[int]
) -> None:
    """Make ``blocks`` the ``entries`` of a new request's tables, group by group."""
    rest = iter(blocks)
    for manager, span in zip(managers, entries, strict=True):
        pool = manager.block_pool
        table = manager.req_to_blocks[request_id]
        table += [pool.null_block] * span.start
        table += [pool.blocks[next(rest)] for _ in span]
