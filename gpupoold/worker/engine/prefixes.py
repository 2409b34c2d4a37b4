"""KV of ended requests, kept in host memory for requests that begin with the same tokens.

When a request ends, its hashed blocks are copied to a
:class:`~gpupoold.memory.prefix_store.PrefixStore`. Blocks that only other workers or files have are
copied to the store for a new request. A request whose blocks are in the store gets blocks of vLLM's
prefix cache whose bytes are on the host. These blocks are copied to the device like the KV of a
paused request, also while another model runs, and vLLM finds the blocks when it starts the request.
vLLM's hashes cover all tokens before the end of a block, the adapter, images and the cache salt.

The entries of a table that a request needs depend on the KV cache group, see :mod:`computed_kv`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes
from vllm.v1.request import Request, RequestStatus

from gpupoold.memory.host import owner_of
from gpupoold.memory.kv import KvMemory
from gpupoold.memory.kv_extents import KvRow
from gpupoold.memory.prefix_tiers import Fetch, PrefixTiers
from gpupoold.memory.transfers import TransferQueue
from gpupoold.worker.engine import block_demand
from gpupoold.worker.engine.block_demand import BlockPoolLedger

# Largest share of an engine's blocks with prefixes of requests that have not started.
_MAX_SHARE = 1 / 4
_owners = itertools.count()


def shared_owner(
    model: str, kv_identity: str, managers: Sequence[Any], rows: Sequence[KvRow]
) -> str | None:
    """Return the name of the KV of all engines of a model with this identity and such a layout.

    None if the identity is not known.
    """
    if not kv_identity:
        return None
    groups = [
        (type(manager).__name__, manager.block_size, manager.kv_cache_group_id)
        for manager in managers
    ]
    return owner_of(model, repr((kv_identity, [row.num_bytes for row in rows], groups)))


class _PrefixBlock(NamedTuple):
    """A block of a prefix: its key in vLLM's cache, and the number of tokens up to its end."""

    key: bytes
    num_tokens: int


class _EndedPrefix(NamedTuple):
    """The blocks of an ended request, each with a reference, and their keys."""

    owner: str
    keys: list[bytes]
    blocks: list[int]


@dataclass(slots=True)
class _HeldPrefix:
    """A request that has not started, with its blocks, each with a reference."""

    request: Request
    blocks: list[int]
    num_tokens: int


class _WaitingRequest(NamedTuple):
    """A request that waits for blocks from other places."""

    request: Request
    fetch: Fetch


@dataclass(eq=False)
class StoredPrefixes:
    """Saves the blocks of an engine's ended requests, and finds blocks for new requests.

    ``managers`` are vLLM's managers of the KV cache groups, ``pool`` its block pool.
    ``lacks_blocks`` returns whether running requests may need more blocks than are free.
    ``owner`` names the KV in the store if other engines have the same, see :func:`shared_owner`;
    None if the KV is of use for this engine only.
    """

    managers: Sequence[Any]
    pool: Any
    ledger: BlockPoolLedger
    kv: KvMemory
    fetcher: PrefixTiers
    lacks_blocks: Callable[[], bool]
    owner: str | None
    hit_bytes: int = field(default=0, init=False)
    """Bytes found in the store so far."""
    saved_bytes: int = field(default=0, init=False)
    """Bytes saved so far."""
    fetched_bytes: Counter[str] = field(default_factory=Counter, init=False)
    """Bytes copied from other workers' memory and from files so far, by tier."""
    unkept: set[str] = field(default_factory=set, init=False)
    """Requests, perhaps about to be added, whose blocks are neither saved nor found."""
    _ended: list[_EndedPrefix] = field(default_factory=list, init=False)
    _held: dict[str, _HeldPrefix] = field(default_factory=dict, init=False)
    _postponed: dict[str, Request] = field(default_factory=dict, init=False)
    """No room yet, in order of arrival."""
    _fetches: list[Fetch] = field(default_factory=list, init=False)
    """In the order of their beginning."""
    _waiting: dict[str, _WaitingRequest] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._private_owner = f"engine {next(_owners)}"
        self._owner = self.owner or self._private_owner
        if self.owner is not None:
            self.fetcher.refresh(self.owner)  # files are read in the background
        self._store = self.fetcher.store
        self._alignment = math.lcm(*(int(manager.block_size) for manager in self.managers))

    @property
    def has_ended(self) -> bool:
        """True if ``save`` has work."""
        return bool(self._ended)

    @property
    def holds_requests(self) -> bool:
        """True if any request waits for its blocks."""
        return bool(self._held or self._postponed or self._waiting)

    @property
    def is_fetching(self) -> bool:
        """True if any request waits for blocks from other places."""
        return bool(self._waiting)

    def attach(self, request: Request) -> None:
        """Give a new request the blocks that the store has, if vLLM's cache has fewer.

        Blocks that only other places have are copied to the store first. Without room
        ``attach_postponed`` tries again.
        """
        if request.skip_reading_prefix_cache or request.request_id in self.unkept:
            return
        fetch = self._fetch(request)
        if fetch is None:
            self._attach_stored(request, may_unmap=False)
        else:
            self._waiting[request.request_id] = _WaitingRequest(request, fetch)

    def _fetch(self, request: Request) -> Fetch | None:
        """Start to copy blocks for a request; return the fetch to wait for, None without any."""
        fetcher, owner = self.fetcher, self._owner_of(request)
        if not fetcher.has_sources or owner == self._private_owner:
            return None
        fetcher.refresh(owner)
        coming = {key: fetch for fetch in self._fetches for key in fetch.keys}
        is_known = self._is_known_to(request)

        def is_somewhere(entry: _PrefixBlock) -> bool:
            return is_known(entry) or entry.key in coming or fetcher.has(owner, entry.key)

        entries = self._longest(request, request.num_tokens - 1, is_somewhere)
        missing = [entry.key for entry in entries if not is_known(entry)]
        new = [key for key in missing if key not in coming]
        fetch = fetcher.begin(owner, new, self._rows) if new else None
        if fetch is not None:
            self._fetches.append(fetch)
            return fetch
        # Fetches end in the order of their beginning.
        wanted = set(missing)
        return next((fetch for fetch in reversed(self._fetches) if fetch.keys & wanted), None)

    def _attach_stored(self, request: Request, *, may_unmap: bool) -> None:
        """Give a request the blocks that the store has; ``may_unmap`` those of ended requests."""
        # The last token is always computed.
        entries = self._longest(request, request.num_tokens - 1, self._is_known_to(request))
        stored = [entry for entry in entries if self._cached(entry) is None]
        if not stored:
            return
        if not (self._has_room(len(entries)) and self._hold(request, entries, stored, may_unmap)):
            self._postponed[request.request_id] = request

    def attach_postponed(self) -> None:
        """Give blocks to requests whose blocks have been fetched, and to requests that had no room.

        Ends when there is no room again.
        """
        if self._fetches or self._waiting:
            self._settle_fetches()
        if not self._postponed or not self._has_room(1):
            return  # called at every step, and a search looks at all blocks of a prefix
        postponed, self._postponed = list(self._postponed.values()), {}
        for index, request in enumerate(postponed):
            self._attach_stored(request, may_unmap=True)
            if self._postponed:
                self._postponed = {request.request_id: request for request in postponed[index:]}
                return

    def may_start(self, request: Request) -> bool:
        """Return whether a waiting request needs no block that is still to come."""
        if request.request_id in self._waiting:
            return False
        held = self._held.get(request.request_id)
        if held is not None:
            return self.kv.is_on_device(held.blocks)
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
        if self._held and self.lacks_blocks():
            self.drop()
            self.kv.discard_dead()

    def end(self, request: Request) -> None:
        """Keep the blocks of a request that ends now, for ``save``."""
        request_id = request.request_id
        self._release(request_id)
        if request_id in self.unkept:
            self.unkept.discard(request_id)
            return
        ends = sorted({request.num_computed_tokens, request.num_prompt_tokens - 1})
        if not any(manager.get_num_skipped_tokens(ends[-1]) for manager in self.managers):
            # Without windows and states, the longer prefix has the blocks of a second answer too.
            ends = ends[-1:]
        prefixes = [self._longest(request, end, self._is_cached) for end in ends]
        found = {entry.key: self._cached(entry) for prefix in prefixes for entry in prefix}
        keys, blocks = list(found), [block.block_id for block in found.values()]
        if blocks and self.kv.is_on_device(blocks):
            self.ledger.keep(blocks)
            self._ended.append(_EndedPrefix(self._owner_of(request), keys, blocks))

    def save(self, queue: TransferQueue) -> None:
        """Start to copy the blocks of ended requests to the store."""
        ended, self._ended = self._ended, []
        for owner, keys, blocks in ended:
            room = None
            if self.kv.is_on_device(blocks):
                room = self._store.begin(owner, keys, self.kv.geometry.rows)
            if room is not None:
                indices, copies = room
                self.kv.store([blocks[index] for index in indices], copies, queue)
                self.saved_bytes += copies.num_bytes
            self.ledger.give(blocks[::-1])

    def drop_ended(self) -> None:
        """Let the blocks of ended requests go without copies."""
        ended, self._ended = self._ended, []
        for fetch in ended:
            self.ledger.give(fetch.blocks[::-1])

    def close(self) -> None:
        """Free the copies that are of no use without the engine; may be repeated."""
        while self._fetches:
            self._fetches.pop().finish()
        self._store.forget(self._private_owner)

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
        self.ledger.keep(blocks)  # first, because room is made with blocks of ended requests
        owner = self._owner_of(request)
        copies = self._store.take(owner, [entry.key for entry in stored], self._rows)
        attached = self.kv.attach_slot(copies, len(stored), may_unmap=may_unmap)
        if attached is None:
            copies.free()
            self.ledger.give(blocks[::-1])
            return False
        for entry, block_id in zip(stored, attached, strict=True):
            self.pool._insert_block_hash(
                entry.key, self.pool.blocks[block_id], num_tokens=entry.num_tokens
            )
        num_tokens = max(entry.num_tokens for entry in entries)
        self._held[request.request_id] = _HeldPrefix(request, blocks + attached, num_tokens)
        self.hit_bytes += copies.num_bytes
        return True

    def _has_room(self, num_blocks: int) -> bool:
        """Return whether waiting requests may hold so many more blocks."""
        num_held = sum(len(held.blocks) for held in self._held.values())
        return not num_held or num_held + num_blocks <= _MAX_SHARE * self.kv.geometry.num_blocks

    def _settle_fetches(self) -> None:
        for fetch in [fetch for fetch in self._fetches if fetch.has_ended]:
            self._fetches.remove(fetch)
            self.fetched_bytes.update(fetch.finish())
        ready = [waiting for waiting in self._waiting.values() if waiting.fetch.has_ended]
        for waiting in ready:
            del self._waiting[waiting.request.request_id]
            self._attach_stored(waiting.request, may_unmap=False)

    def _release(self, request_id: str) -> None:
        self._postponed.pop(request_id, None)
        self._waiting.pop(request_id, None)
        held = self._held.pop(request_id, None)
        if held is not None:
            self.ledger.give(held.blocks[::-1])

    def _longest(
        self, request: Request, max_tokens: int, is_known: Callable[[_PrefixBlock], bool]
    ) -> list[_PrefixBlock]:
        """Return the needed blocks of the longest prefix whose needed blocks are all known."""
        limit = self._aligned(min(max_tokens, request.num_tokens))
        partial = []  # groups that do not need all blocks
        for manager in self.managers:
            if manager.get_num_skipped_tokens(limit):
                partial.append(manager)
                continue
            entries = self._entries(request, manager, limit)
            num_known = sum(1 for _ in itertools.takewhile(is_known, entries))
            limit = self._aligned(num_known * int(manager.block_size))
        while limit > 0:
            needed = (self._entries(request, manager, limit) for manager in partial)
            if all(is_known(entry) for entries in needed for entry in entries):
                each = (self._entries(request, manager, limit) for manager in self.managers)
                return [entry for entries in each for entry in entries]
            limit -= self._alignment
        return []

    def _entries(self, request: Request, manager: Any, num_tokens: int) -> Iterator[_PrefixBlock]:
        """Yield the blocks of one group that a request needs after ``num_tokens`` tokens."""
        size, group = int(manager.block_size), int(manager.kv_cache_group_id)
        hashes = resolve_block_hashes(request.block_hashes, self.pool.hash_block_size, size)
        [span] = block_demand.spans([manager], num_tokens)
        for index in span:
            if index >= len(hashes):
                return
            yield _PrefixBlock(
                make_block_hash_with_group_id(hashes[index], group), (index + 1) * size
            )

    def _is_cached(self, entry: _PrefixBlock) -> bool:
        return self._cached(entry) is not None

    def _is_known_to(self, request: Request) -> Callable[[_PrefixBlock], bool]:
        owner = self._owner_of(request)
        return lambda entry: self._is_cached(entry) or self._store.has(owner, entry.key)

    def _owner_of(self, request: Request) -> str:
        """Return the owner of a request's KV in the store.

        vLLM's hashes have the path of an adapter, whose files may be others for a later engine.
        """
        return self._owner if request.lora_request is None else self._private_owner

    def _cached(self, entry: _PrefixBlock) -> Any:
        """Return the block of vLLM's prefix cache, None without any."""
        return self.pool.cached_block_hash_to_block.get_one_block(entry.key)

    @property
    def _rows(self) -> Sequence[Any]:
        return self.kv.geometry.rows

    def _aligned(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._alignment
