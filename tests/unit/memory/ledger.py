"""A small block pool that behaves as an engine's does: references, a free list, cached prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from gpupoold.memory.kv_extents import ExtentIndex


class MemoryLedger:
    """Implements ``BlockLedger``; block 0 is the null block and never handed out.

    ``allocate``, ``release``, ``remember`` and ``reuse`` are what an engine does.
    """

    def __init__(self, num_blocks: int) -> None:
        self.refs = [0] * num_blocks
        self.refs[0] = 1
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._key_of: dict[int, str] = {}
        self._block_of: dict[str, int] = {}
        self._watcher: ExtentIndex | None = None

    # What the memory code asks for.

    def watch(self, watcher: ExtentIndex) -> None:
        assert not any(self.refs[1:])
        self._watcher = watcher

    def hold(self, block_ids: Sequence[int]) -> None:
        assert 0 not in block_ids
        self.forget(block_ids)
        for block_id in block_ids:
            assert self.refs[block_id] == 0, f"block {block_id} is in use and cannot be held"
            self._touch(block_id)

    def keep(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert self.refs[block_id] > 0, f"block {block_id} is free and cannot be kept"
            self._touch(block_id)

    def give(self, block_ids: Sequence[int]) -> None:
        self.release(block_ids)

    def live(self, block_ids: Iterable[int]) -> list[int]:
        return [block_id for block_id in block_ids if self.refs[block_id] > 0]

    def forget(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            key = self._key_of.pop(block_id, None)
            if key is not None:
                del self._block_of[key]

    @property
    def num_free(self) -> int:
        return len(self._free)

    # What an engine does.

    def allocate(self, num_blocks: int) -> list[int]:
        """The least recently freed blocks; their cached prefixes are lost."""
        taken = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        self.forget(taken)
        for block_id in taken:
            self.refs[block_id] = 1
        if self._watcher is not None:
            self._watcher.taken(taken)
        return taken

    def release(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert self.refs[block_id] > 0, f"block {block_id} is free already"
            self.refs[block_id] -= 1
            if not self.refs[block_id]:
                self._free[block_id] = None
                if self._watcher is not None:
                    self._watcher.freed([block_id])

    def remember(self, block_id: int, key: str) -> None:
        """The block is full: its content can be found by ``key``, also when it is free."""
        assert self.refs[block_id] > 0
        if block_id not in self._key_of and key not in self._block_of:
            self._key_of[block_id] = key
            self._block_of[key] = block_id

    def reuse(self, key: str) -> int | None:
        """One more reference to the block that has this content, if there is one."""
        block_id = self._block_of.get(key)
        if block_id is not None:
            self._touch(block_id)
        return block_id

    def cached(self) -> dict[str, int]:
        """All findable contents and their blocks."""
        return dict(self._block_of)

    def _touch(self, block_id: int) -> None:
        if not self.refs[block_id]:
            del self._free[block_id]
            if self._watcher is not None:
                self._watcher.taken([block_id])
        self.refs[block_id] += 1
