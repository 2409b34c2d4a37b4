"""What a device offers: physical pages, reserved addresses, copies to and from the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol


class OutOfPages(Exception):
    """The pool has too few free pages. A scheduling miss: callers must plan for it."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """``num_pages`` physically consecutive pages from ``first``."""

    first: int
    num_pages: int

    @property
    def end(self) -> int:
        """One past the last page."""
        return self.first + self.num_pages


@dataclass(slots=True)
class FillTime:
    """Thread-seconds spent in ``map_and_fill`` so far, by what they went to."""

    map_s: float = 0.0
    copy_s: float = 0.0

    def map_share_since(self, before: FillTime) -> float:
        """Share of mapping in the time spent since ``before``; 0 when none was."""
        mapped, copied = self.map_s - before.map_s, self.copy_s - before.copy_s
        return mapped / (mapped + copied) if mapped + copied > 0 else 0.0


class Copy(NamedTuple):
    """``num_bytes`` from ``source`` to ``target``, one of them a host address."""

    target: int
    source: int
    num_bytes: int


class Direction(Enum):
    """Which way a copy stream copies."""

    IN = auto()
    OUT = auto()


class CopyStream(Protocol):
    """Copies in one direction beside what engines compute, for one thread of its own.

    The pages must stay mapped and the host memory pinned until a copy has been made, and no
    kernel may use its bytes meanwhile; kernels that were launched before ``fence`` have
    ended before a copy begins that comes ``after`` it. Where a device has several copy streams each
    way, a fence of one of them holds for all.
    """

    def fence(self) -> int:
        """What engines have launched up to now; from the turn loop's thread."""

    def begin(self, copies: Sequence[Copy], after: int) -> int:
        """Make ``copies`` as one batch, in any order; returns its number, to be waited for.

        May return before they have been made.
        """

    def wait(self, batch: int) -> None:
        """Return when a batch, and all that were begun before it, have been made."""

    def close(self) -> None:
        """No copy comes any more; from any thread."""


class Device(ABC):
    """One device's memory. All calls come from the worker's turn loop, but for copy streams'.

    Physical pages ``0 .. num_pages - 1`` exist from construction to ``close``;
    who owns them is the page pool's business. Addresses are plain integers and
    valid for tensors while pages are mapped there.
    """

    page_bytes: int
    num_pages: int
    is_host_addressable: bool
    table_pages: int = 1
    """Pages that one page table maps, where tables that are moved whole are cheaper to map."""
    numa_node: int = -1
    """Whose host memory is nearest; -1 where that makes no difference."""

    def __init__(self) -> None:
        self.spent = FillTime()

    @abstractmethod
    def reserve(self, num_pages: int) -> int:
        """Reserve addresses for ``num_pages``; touching them before ``map`` is an error."""

    @abstractmethod
    def release(self, address: int, num_pages: int) -> None:
        """Give reserved addresses back; nothing may be mapped there."""

    @abstractmethod
    def map(self, address: int, runs: list[PageRun]) -> None:
        """Map the runs one behind the other from ``address``; contents are undefined.

        When it raises, nothing is mapped.
        """

    @abstractmethod
    def unmap(self, address: int, runs: list[PageRun]) -> None:
        """Undo a ``map`` of the same runs at ``address``; the range stays reserved."""

    def unmap_each(self, mappings: Sequence[tuple[int, list[PageRun]]]) -> None:
        """``unmap`` several; backends wait for what may use the pages but once."""
        for address, runs in mappings:
            self.unmap(address, runs)

    @abstractmethod
    def map_and_fill(self, address: int, runs: list[PageRun], source: int | None) -> None:
        """``map``, then copy the same bytes from host address ``source`` (None: zeros).

        When it raises, nothing is mapped. Backends overlap mapping and copying where they can.
        """

    @abstractmethod
    def zero(self, address: int, num_bytes: int) -> None:
        """Set mapped bytes to zero, before any kernel that is launched later."""

    @abstractmethod
    def copy_in(self, address: int, source: int, num_bytes: int) -> None:
        """Host to device."""

    @abstractmethod
    def copy_out(self, target: int, address: int, num_bytes: int) -> None:
        """Device to host."""

    @abstractmethod
    def open_copy_stream(self, direction: Direction) -> CopyStream:
        """A way for copies of its own, beside those above and what engines compute."""

    def open_copy_streams(self, direction: Direction) -> list[CopyStream]:
        """As many as it takes to fill the link."""
        return [self.open_copy_stream(direction)]

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Device memory outside of the pages that nobody has taken; None where there is none."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when every copy asked for before has ended."""

    @abstractmethod
    def pin(self, address: int, num_bytes: int) -> None:
        """Pin host memory for full-speed copies. Slow on a GPU (0.1 s per GB): never in a switch.

        When it raises, nothing is pinned.
        """

    @abstractmethod
    def unpin(self, address: int, num_bytes: int) -> None:
        """Undo a ``pin`` of the same range, before it is unmapped."""

    @abstractmethod
    def lend(self, runs: list[PageRun]) -> None:
        """Leave the memory of unmapped pages to other users of the device until ``reclaim``."""

    @abstractmethod
    def reclaim(self, runs: list[PageRun]) -> None:
        """End a ``lend`` of the same runs; their users must have freed the memory."""

    @abstractmethod
    def close(self) -> None:
        """Give all physical memory back; every address range must have been released."""


class BlockWatcher(Protocol):
    """Is told of every block that a request, or a hold, begins or ceases to use."""

    def taken(self, block_ids: Iterable[int]) -> None:
        """Free blocks are in use now."""

    def freed(self, block_ids: Iterable[int]) -> None:
        """Blocks are not in use any more."""


class BlockLedger(Protocol):
    """The engine's own account of its blocks. Block 0 is its null block and never listed."""

    def watch(self, watcher: BlockWatcher) -> None:
        """Tell ``watcher`` of every change from now on; all blocks must be free."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """Take free blocks out of the engine's reach; their cached prefixes are forgotten."""

    def keep(self, block_ids: Sequence[int]) -> None:
        """Let blocks that a request uses outlive it, until they are given back."""

    def give(self, block_ids: Sequence[int]) -> None:
        """Put held blocks back on the engine's free list."""

    def live(self, block_ids: Iterable[int]) -> list[int]:
        """Those of the blocks that a request, or a hold, uses."""

    @property
    def num_free(self) -> int:
        """Blocks the engine could hand out now."""
