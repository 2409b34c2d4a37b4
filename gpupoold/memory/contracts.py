"""The interface of a device: physical pages, reserved addresses, copies to and from the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from gpupoold.memory.libc import memcpy


class OutOfPages(Exception):
    """The pool has too few free pages. A planning error: callers must check before."""


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
    """Thread-seconds in ``map_and_fill`` so far, by activity."""

    map_s: float = 0.0
    copy_s: float = 0.0

    def map_share_since(self, before: FillTime) -> float:
        """Return the share of mapping in the time since ``before``; 0 if no time was spent."""
        mapped, copied = self.map_s - before.map_s, self.copy_s - before.copy_s
        return mapped / (mapped + copied) if mapped + copied > 0 else 0.0


class Copy(NamedTuple):
    """A copy of ``num_bytes`` from ``source`` to ``target``, one of which is a host address."""

    target: int
    source: int
    num_bytes: int


class Direction(Enum):
    """The direction of a copy stream."""

    IN = auto()
    OUT = auto()


class CopyStream(Protocol):
    """Copies in one direction that overlap the engines' kernels; for use by one thread.

    Until a copy has finished, its pages must stay mapped, its host memory pinned, and no kernel may
    use its bytes. Kernels launched before ``fence`` finish before any copy that starts ``after``
    the fence. If a device has several copy streams per direction, a fence of any applies to all.
    """

    def fence(self) -> int:
        """Return a fence after all kernels launched so far; called by the turn loop's thread."""

    def begin(self, copies: Sequence[Copy], after: int) -> int:
        """Start ``copies`` as one batch, in any order; return its number for ``wait``.

        May return before the copies have finished.
        """

    def wait(self, batch: int) -> None:
        """Return when a batch and all earlier ones have finished."""

    def close(self) -> None:
        """Close the copy stream, on which no copy may start any more; callable by any thread."""


class Fence:
    """A moment of the engines' work: the kernels launched before ``record``.

    This class is the fence of a device whose kernels are synchronous: no method has work to do.
    """

    def record(self) -> None:
        """Take the present moment instead of the former one."""

    def wait(self) -> None:
        """Return when the kernels of the moment have finished; at once without a moment."""

    def close(self) -> None:
        """Free the fence's resources."""


class Device(ABC):
    """One device's memory.

    The worker's turn loop makes all calls, except those of copy streams and of ``DeviceThread``.

    Physical pages ``0 .. num_pages - 1`` exist from construction to ``close``; the page pool
    assigns the pages to owners. Addresses are plain integers, valid for tensors while pages are
    mapped.
    """

    page_bytes: int
    num_pages: int
    is_host_addressable: bool
    has_link: bool = True
    """False if the host's cores make the copies, which then delay steps instead of overlapping."""
    table_pages: int = 1
    """Pages per page table, where moving a whole table makes mapping cheaper."""
    piece_bytes: int = 16 << 20
    """Bytes that ``map_and_fill`` copies while it maps the next piece, if the backend can."""
    load_slack_bytes: int = 0
    """Memory that vLLM needs beyond a model's weights while it loads the model."""
    copy_batch_bytes: int = 8 << 20
    """Bytes that a copy stream copies at a time, enough to keep the link busy."""
    numa_node: int = -1
    """NUMA node with the nearest host memory, -1 if all nodes are equal."""
    pci_bus_id: str = ""
    """PCI address of the GPU, of the first GPU of a group; empty on an emulated device."""
    num_ranks: int = 1
    """Number of GPUs that hold each model together. Pages and bytes are those of one rank."""

    def __init__(self) -> None:
        self.spent = FillTime()

    def share_host(self, address: int, num_bytes: int, fd: int) -> None:  # noqa: B027
        """Let the other ranks map and pin their parts of the memory behind ``fd``.

        Part ``r`` begins at ``r * num_bytes``; the caller has mapped and pinned part 0.
        """

    @abstractmethod
    def reserve(self, num_pages: int) -> int:
        """Reserve addresses for ``num_pages``; access before ``map`` is an error."""

    @abstractmethod
    def release(self, address: int, num_pages: int) -> None:
        """Release reserved addresses without mappings."""

    @abstractmethod
    def map(self, address: int, runs: list[PageRun]) -> None:
        """Map the runs one after the other from ``address``; contents are undefined.

        After an exception nothing is mapped.
        """

    def unmap(self, address: int, runs: list[PageRun]) -> None:
        """Undo a ``map`` of the same runs at ``address``; the range stays reserved."""
        self.unmap_each([(address, runs)])

    @abstractmethod
    def unmap_each(
        self, mappings: Sequence[tuple[int, list[PageRun]]], last_use: Fence | None = None
    ) -> None:
        """Unmap several mappings; backends wait only once for users of the pages.

        No kernel launched after ``last_use`` uses the pages; None means that any kernel may.
        """

    def open_fence(self) -> Fence:
        """Return a fence without a moment."""
        return Fence()

    @abstractmethod
    def map_and_fill(self, address: int, runs: list[PageRun], source: int | None) -> None:
        """Map, then copy the same number of bytes from host address ``source`` (None: zeros).

        After an exception nothing is mapped. Backends overlap mapping and copying where possible.
        """

    @abstractmethod
    def zero(self, address: int, num_bytes: int) -> None:
        """Set mapped bytes to zero before any kernel launched later."""

    @abstractmethod
    def copy_in(self, address: int, source: int, num_bytes: int) -> None:
        """Copy ``num_bytes`` from host address ``source`` to the device's ``address``."""

    @abstractmethod
    def copy_out(self, target: int, address: int, num_bytes: int) -> None:
        """Copy ``num_bytes`` from the device's ``address`` to host address ``target``."""

    def copy_in_host(self, target: int, source: int, num_bytes: int) -> None:
        """Copy from host address to host address, in the calling thread."""
        memcpy(target, source, num_bytes)

    @abstractmethod
    def open_copy_stream(self, direction: Direction) -> CopyStream:
        """Open a copy stream, independent of the calls above and of the engines' kernels."""

    def open_copy_streams(self, direction: Direction) -> list[CopyStream]:
        """Open as many copy streams as fill the link."""
        return [self.open_copy_stream(direction)]

    def free_bytes(self) -> int | None:
        """Return the free bytes of device memory outside of the pages; None without such memory."""
        return None

    def synchronize(self) -> None:  # noqa: B027
        """Return when all copies started earlier have finished."""

    def wait_for_ranks(self) -> None:  # noqa: B027
        """Return when all ranks have made the copies and mappings of the calls above."""

    def pin(self, address: int, num_bytes: int) -> None:  # noqa: B027
        """Pin host memory for full-speed copies.

        Slow on a GPU (0.1 s per GB), so never called in a switch.

        After an exception nothing is pinned.
        """

    def unpin(self, address: int, num_bytes: int) -> None:  # noqa: B027
        """Undo a ``pin`` of the same range, before the range is unmapped."""

    def release_memory(self, runs: list[PageRun]) -> None:  # noqa: B027
        """Release the memory of unmapped pages to other users of the device until ``reclaim``."""

    def reclaim(self, runs: list[PageRun]) -> None:  # noqa: B027
        """Reclaim runs of ``release_memory``; the other users must have freed the memory."""

    @abstractmethod
    def close(self) -> None:
        """Free all physical memory; every address range must have been released before."""
