"""What a device offers: physical pages, reserved addresses, copies to and from the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol


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


class Lane(Protocol):
    """Copies of one other thread than the turn loop's; each returns when it has been made.

    The pages must be mapped and the host memory pinned until then, and no kernel may use
    the bytes meanwhile.
    """

    def copy_in(self, address: int, source: int, num_bytes: int) -> None:
        """Host to device."""

    def close(self) -> None:
        """No copy comes any more; from any thread."""


class Device(ABC):
    """One device's memory. All calls come from the instance's turn loop, but for lanes'.

    Physical pages ``0 .. num_pages - 1`` exist from construction to ``close``;
    who owns them is the page pool's business. Addresses are plain integers and
    valid for tensors while pages are mapped there.
    """

    page_bytes: int
    num_pages: int
    is_host_addressable: bool

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

    @abstractmethod
    def map_and_fill(self, address: int, runs: list[PageRun], source: int | None) -> None:
        """``map``, then copy the same bytes from host address ``source`` (None: zeros).

        When it raises, nothing is mapped. Backends overlap mapping and copying where they can.
        """

    @abstractmethod
    def copy_in(self, address: int, source: int, num_bytes: int) -> None:
        """Host to device."""

    @abstractmethod
    def copy_out(self, target: int, address: int, num_bytes: int) -> None:
        """Device to host."""

    @abstractmethod
    def open_lane(self) -> Lane:
        """A way for copies of its own, beside those above and what engines compute."""

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
        """Give all physical memory back; every region must have been released."""
