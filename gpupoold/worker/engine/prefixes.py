"""KV of ended requests, kept in host memory for requests that begin with the same tokens.

When a request ends, its hashed blocks are copied to the :class:`PrefixStore`. A new request whose
blocks are in the store gets blocks of vLLM's prefix cache whose bytes are on the host. These blocks
are copied to the device like the KV of a paused request, also while another model runs, and vLLM
finds the blocks when it starts the request. vLLM's hashes cover all tokens before the end of a
block, the adapter, images and the cache salt.

The entries of a table that a request needs depend on the KV cache group, see :mod:`computed_kv`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes
from vllm.v1.request import Request, RequestStatus

from gpupoold.memory.kv import KvMemory
from gpupoold.memory.prefix_store import PrefixStore
from gpupoold.memory.transfers import TransferQueue
from gpupoold.worker.engine import computed_kv
from gpupoold.worker.engine.block_ledger import BlockPoolLedger

# Largest share of an engine's blocks with prefixes of requests that have not started.
_MAX_SHARE = 1 / 4
_owners = itertools.count()


class _PrefixBlock(NamedTuple):
    """A block of a prefix: its key in vLLM's cache, and the number of tokens up to its end."""

    key: bytes
    num_tokens: int


@dataclass(slots=True)
class _HeldPrefix:
    """A request that has not started, with its blocks, each with a reference."""

    request: Request
    blocks: list[int]
    num_tokens: int


class StoredPrefixes:
    """Saves the blocks of an engine's ended requests, and finds blocks for new requests."""

    def __init__(
        self,
        managers: Sequence[Any],
        pool: Any,
        ledger: BlockPoolLedger,
        kv: KvMemory,
        store: PrefixStore,
        lacks_blocks: Callable[[], bool],
    ) -> None:
        """``managers`` are vLLM's managers of the KV cache groups, ``pool`` its block pool.

        ``lacks_blocks`` returns whether running requests may need more blocks than are free.
        """
        self.hit_bytes = 0
        """Bytes found in the store so far."""
        self.saved_bytes = 0
        """Bytes saved so far."""
        self._owner = str(next(_owners))
        self._unkept: set[str] = set()
        self._managers = managers
        self._pool = pool
        self._ledger = ledger
        self._kv = kv
        self._store = store
        self._lacks_blocks = lacks_blocks
        self._alignment = math.lcm(*(int(manager.block_size) for manager in managers))
        self._ended: list[tuple[list[bytes], list[int]]] = []  # keys, blocks with a reference
        self._held: dict[str, _HeldPrefix] = {}
        self._postponed: dict[str, Request] = {}  # no room yet, in order of arrival

    @property
    def has_ended(self) -> bool:
        """True if ``save`` has work."""
        return bool(self._ended)

    @property
    def holds_requests(self) -> bool:
        """True if any request waits for its blocks."""
        return bool(self._held or self._postponed)

    def ignore(self, request_id: str) -> None:
        """Neither save nor find blocks of a request that is about to be added."""
        self._unkept.add(request_id)

    def attach(self, request: Request, *, may_unmap: bool = False) -> None:
        """Give a new request the blocks that the store has, if vLLM's cache has fewer.

        Without room ``attach_postponed`` tries again. With ``may_unmap`` blocks of other ended
        requests may go.
        """
        if request.skip_reading_prefix_cache or request.request_id in self._unkept:
            return
        # The last token is always computed.
        entries = self._longest(request, request.num_tokens - 1, self._is_known)
        stored = [entry for entry in entries if self._cached(entry) is None]
        if not stored:
            return
        if not (self._has_room(len(entries)) and self._hold(request, entries, stored, may_unmap)):
            self._postponed[request.request_id] = request

    def attach_postponed(self) -> None:
        """Give blocks to requests that had no room, until there is no room again."""
        if not self._postponed or not self._has_room(1):
            return  # called at every step, and a search looks at all blocks of a prefix
        postponed, self._postponed = list(self._postponed.values()), {}
        for index, request in enumerate(postponed):
            self.attach(request, may_unmap=True)
            if self._postponed:
                self._postponed = {one.request_id: one for one in postponed[index:]}
                return

    def may_start(self, request: Request) -> bool:
        """Return whether a waiting request needs no block that is still to come."""
        held = self._held.get(request.request_id)
        if held is not None:
            return self._kv.is_on_device(held.blocks)
        # Without any request that holds blocks there will be no room later either.
        return request.request_id not in self._postponed or not self._held

    def num_cached_tokens(self, request: Request) -> int:
        """Return the number of tokens of a waiting request whose blocks are kept for it."""
        held = self._held.get(request.request_id)
        return 0 if held is None else held.num_tokens

    def blocks(self) -> Iterator[int]:
        """Yield the blocks kept for waiting requests, in order of arrival."""
        for held in self._held.values():
            yield from held.blocks

    def release_started(self) -> None:
        """Leave the blocks of requests that have started to vLLM."""
        for held in list(self._held.values()):
            if held.request.status == RequestStatus.RUNNING:
                self._release(held.request.request_id)

    def drop(self) -> bool:
        """Let go of the blocks kept for waiting requests; return False without any.

        Offloaded blocks among them stay held until ``KvMemory.discard_dead``.
        """
        has_any = bool(self._held)
        for request_id in list(self._held):
            self._release(request_id)
        self._postponed.clear()
        return has_any

    def drop_if_short(self) -> None:
        """Let go of these blocks if running requests may need them."""
        if self._held and self._lacks_blocks():
            self.drop()
            self._kv.discard_dead()

    def end(self, request: Request) -> None:
        """Keep the blocks of a request that ends now, for ``save``."""
        request_id = request.request_id
        self._release(request_id)
        if request_id in self._unkept:
            self._unkept.discard(request_id)
            return
        ends = sorted({request.num_computed_tokens, request.num_prompt_tokens - 1})
        if not any(manager.get_num_skipped_tokens(ends[-1]) for manager in self._managers):
            # Without windows and states, the longer prefix has the blocks of a second answer too.
            ends = ends[-1:]
        prefixes = [self._longest(request, end, self._is_cached) for end in ends]
        found = {entry.key: self._cached(entry) for prefix in prefixes for entry in prefix}
        keys, blocks = list(found), [block.block_id for block in found.values()]
        if blocks and self._kv.is_on_device(blocks):
            self._ledger.keep(blocks)
            self._ended.append((keys, blocks))

    def save(self, queue: TransferQueue) -> None:
        """Start to copy the blocks of ended requests to the store."""
        ended, self._ended = self._ended, []
        for keys, blocks in ended:
            room = None
            if self._kv.is_on_device(blocks):
                room = self._store.begin(self._owner, keys, self._kv.geometry.rows)
            if room is not None:
                indices, copies = room
                self._kv.store([blocks[index] for index in indices], copies, queue)
                self.saved_bytes += copies.num_bytes
            self._ledger.give(blocks[::-1])

    def drop_ended(self) -> None:
        """Let the blocks of ended requests go without copies."""
        ended, self._ended = self._ended, []
        for _, blocks in ended:
            self._ledger.give(blocks[::-1])

    def forget(self) -> None:
        """Free the copies of an engine that is gone."""
        self._store.forget(self._owner)

    def _hold(
        self,
        request: Request,
        entries: list[_PrefixBlock],
        stored: list[_PrefixBlock],
        may_unmap: bool,
    ) -> bool:
        """Keep cached blocks and attach copies of ``stored``; return False without room."""
        cached = [block for entry in entries if (block := self._cached(entry)) is not None]
        blocks = [block.block_id for block in cached]
        self._ledger.keep(blocks)  # first, because room is made with blocks of ended requests
        copies = self._store.take(self._owner, [entry.key for entry in stored], self._rows)
        attached = self._kv.attach_slot(copies, len(stored), may_unmap=may_unmap)
        if attached is None:
            copies.free()
            self._ledger.give(blocks[::-1])
            return False
        for entry, block_id in zip(stored, attached, strict=True):
            self._pool._insert_block_hash(
                entry.key, self._pool.blocks[block_id], num_tokens=entry.num_tokens
            )
        num_tokens = max(entry.num_tokens for entry in entries)
        self._held[request.request_id] = _HeldPrefix(request, blocks + attached, num_tokens)
        self.hit_bytes += copies.num_bytes
        return True

    def _has_room(self, num_blocks: int) -> bool:
        """Return whether waiting requests may hold so many more blocks."""
        num_held = sum(len(held.blocks) for held in self._held.values())
        return not num_held or num_held + num_blocks <= _MAX_SHARE * self._kv.geometry.num_blocks

    def _release(self, request_id: str) -> None:
        self._postponed.pop(request_id, None)
        held = self._held.pop(request_id, None)
        if held is not None:
            self._ledger.give(held.blocks[::-1])

    def _longest(
        self, request: Request, max_tokens: int, is_known: Callable[[_PrefixBlock], bool]
    ) -> list[_PrefixBlock]:
        """Return the needed blocks of the longest prefix whose needed blocks are all known."""
        limit = self._aligned(min(max_tokens, request.num_tokens))
        partial = []  # groups that do not need all blocks
        for manager in self._managers:
            if manager.get_num_skipped_tokens(limit):
                partial.append(manager)
                continue
            entries = self._entries(request, manager, limit)
            num_known = sum(1 for _ in itertools.takewhile(is_known, entries))
            limit = self._aligned(num_known * int(manager.block_size))
        while limit > 0:
            needed = (self._entries(request, manager, limit) for manager in partial)
            if all(is_known(entry) for entries in needed for entry in entries):
                each = (self._entries(request, manager, limit) for manager in self._managers)
                return [entry for entries in each for entry in entries]
            limit -= self._alignment
        return []

    def _entries(self, request: Request, manager: Any, num_tokens: int) -> Iterator[_PrefixBlock]:
        """Yield the blocks of one group that a request needs after ``num_tokens`` tokens."""
        size, group = int(manager.block_size), int(manager.kv_cache_group_id)
        hashes = resolve_block_hashes(request.block_hashes, self._pool.hash_block_size, size)
        [span] = computed_kv.spans([manager], num_tokens)
        for index in span:
            if index >= len(hashes):
                return
            yield _PrefixBlock(
                make_block_hash_with_group_id(hashes[index], group), (index + 1) * size
            )

    def _is_cached(self, entry: _PrefixBlock) -> bool:
        return self._cached(entry) is not None

    def _is_known(self, entry: _PrefixBlock) -> bool:
        return self._is_cached(entry) or self._store.has(self._owner, entry.key)

    def _cached(self, entry: _PrefixBlock) -> Any:
        """Return the block of vLLM's prefix cache, None without any."""
        return self._pool.cached_block_hash_to_block.get_one_block(entry.key)

    @property
    def _rows(self) -> Sequence[Any]:
        return self._kv.geometry.rows

    def _aligned(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._alignment
