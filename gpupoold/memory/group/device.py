"""The device of a group's leader: orders to memory are carried out on all ranks.

All ranks have equally many pages of equal size, and each model's regions have the same size on each
rank. So the leader's accounts of pages, extents and host slots hold for all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from gpupoold.errors import Failed
from gpupoold.memory.contracts import CopyStream, Device, Direction, Fence, PageRun
from gpupoold.memory.group.copy_stream import Fences, LeaderCopyStream
from gpupoold.memory.group.link import Link
from gpupoold.memory.group.orders import OrderBook
from gpupoold.memory.group.regions import CopyMethod, LeaderRegions, PlacedMapping


class GroupDevice(Device):
    """The leader's own device ``own``, and the followers' devices by orders.

    An address outside of all regions is the leader's alone.
    """

    def __init__(
        self, own: Device, orders: OrderBook, files: Sequence[Link], num_pages: int
    ) -> None:
        """``files`` are links to threads that map and pin host memory.

        ``num_pages`` is the least number of pages of a rank.
        """
        super().__init__()
        self._own = own
        self._orders = orders
        self._files = files
        self.regions = LeaderRegions()
        self._sending, self._calling = threading.Lock(), threading.Lock()
        self._fences = itertools.count(1)
        self._copy_fences = Fences()
        self._streams = itertools.count(1)
        self.spent = own.spent
        self.page_bytes = own.page_bytes
        self.num_pages = num_pages
        self.is_host_addressable = own.is_host_addressable
        self.piece_bytes = own.piece_bytes
        self.load_slack_bytes = own.load_slack_bytes
        self.has_link = own.has_link
        self.table_pages = own.table_pages
        self.copy_batch_bytes = own.copy_batch_bytes
        self.numa_node = own.numa_node
        self.num_ranks = orders.num_followers + 1

    def share_host(self, address: int, num_bytes: int, fd: int) -> None:
        number = self.regions.new_number()
        self.call_files("map_host", number, num_bytes, fds=[fd])
        self.regions.add(number, address, num_bytes)

    def call_files(self, method: str, *arguments: Any, fds: Sequence[int] = ()) -> None:
        """Call a method on the followers' threads for files, and wait for its end.

        Raises:
            Failed: the text of a follower's error.
        """
        with self._calling:
            self._send_files(method, *arguments, fds=fds)
            problems = [problem for link in self._files if (problem := link.receive()[0])]
        if problems:
            raise Failed(problems[0])

    def reserve(self, num_pages: int) -> int:
        return self._own.reserve(num_pages)

    def release(self, address: int, num_pages: int) -> None:
        number = self.regions.pop(address)
        if number is not None:
            self._orders.send("close_region", number)
        self._own.release(address, num_pages)

    def map(self, address: int, runs: list[PageRun]) -> None:
        with self._everywhere("map", address, runs):
            self._own.map(address, runs)

    def map_and_fill(self, address: int, runs: list[PageRun], source: int | None) -> None:
        at = None if source is None else self.regions.place(source)
        with self._everywhere("map_and_fill", address, runs, at):
            self._own.map_and_fill(address, runs, source)

    def unmap(self, address: int, runs: list[PageRun]) -> None:
        self.unmap_each([(address, runs)])

    def unmap_each(
        self, mappings: Sequence[tuple[int, list[PageRun]]], last_use: Fence | None = None
    ) -> None:
        assert last_use is None or isinstance(last_use, _GroupFence)
        placed = [self._place(address, runs) for address, runs in mappings]
        found = [mapping for mapping in placed if mapping is not None]
        if found:
            self._orders.send("unmap", found, last_use.number if last_use is not None else 0)
        self._own.unmap_each(mappings, last_use.own if last_use is not None else None)

    def open_fence(self) -> Fence:
        return _GroupFence(self._own.open_fence(), next(self._fences), self._orders)

    def zero(self, address: int, num_bytes: int) -> None:
        if (place := self.regions.place(address)) is not None:
            self._orders.send("zero", place, num_bytes)
        self._own.zero(address, num_bytes)

    def copy_in(self, address: int, source: int, num_bytes: int) -> None:
        self._copied("copy_in", address, source, num_bytes)
        self._own.copy_in(address, source, num_bytes)

    def copy_out(self, target: int, address: int, num_bytes: int) -> None:
        self._copied("copy_out", target, address, num_bytes)
        self._own.copy_out(target, address, num_bytes)

    def copy_in_host(self, target: int, source: int, num_bytes: int) -> None:
        self._copied("copy_in_host", target, source, num_bytes)
        self._own.copy_in_host(target, source, num_bytes)

    def open_copy_stream(self, direction: Direction) -> CopyStream:
        return self._open(direction, self._own.open_copy_stream(direction))

    def open_copy_streams(self, direction: Direction) -> list[CopyStream]:
        return [self._open(direction, own) for own in self._own.open_copy_streams(direction)]

    def free_bytes(self) -> int | None:
        return self._own.free_bytes()

    def synchronize(self) -> None:
        """Wait for the leader's copies; orders sent later follow the followers' copies."""
        self._own.synchronize()

    def wait_for_ranks(self) -> None:
        self._orders.send("synchronize")
        self._orders.wait()

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin the leader's memory; followers pin their own in ``map_host`` and in a load."""
        self._own.pin(address, num_bytes)

    def unpin(self, address: int, num_bytes: int) -> None:
        number = self.regions.pop(address)
        if number is not None:
            self._send_files("close_region", number)
        self._own.unpin(address, num_bytes)

    def release_memory(self, runs: list[PageRun]) -> None:
        self._orders.send("release_memory", runs)
        self._own.release_memory(runs)

    def reclaim(self, runs: list[PageRun]) -> None:
        self._orders.send("reclaim", runs)
        self._own.reclaim(runs)

    def close(self) -> None:
        self._own.close()

    @contextlib.contextmanager
    def _everywhere(
        self, method: str, address: int, runs: list[PageRun], *more: Any
    ) -> Iterator[None]:
        """Order a mapping; the context makes the leader's at the same time.

        The order is undone after an error of the context.
        """
        placed = self._place(address, runs)
        if placed is not None:
            self._orders.send(method, placed, *more)
        try:
            yield
        except BaseException:
            if placed is not None:
                self._orders.send("unmap", [placed], 0)
            raise

    def _send_files(self, method: str, *arguments: Any, fds: Sequence[int] = ()) -> None:
        with self._sending:
            for link in self._files:
                link.send((self._orders.num_sent, method, arguments), fds)

    def _place(self, address: int, runs: list[PageRun]) -> PlacedMapping | None:
        place = self.regions.place(address)
        return None if place is None else (place, runs)

    def _copied(self, method: CopyMethod, target: int, source: int, num_bytes: int) -> None:
        to, from_ = self.regions.place(target), self.regions.place(source)
        assert (to is None) == (from_ is None), "the ranks share one address of a copy only"
        if to is not None and from_ is not None:
            self._orders.send("copy", method, to, from_, num_bytes)

    def _open(self, direction: Direction, own: CopyStream) -> CopyStream:
        number = next(self._streams)
        ends = [Link.pair() for _ in self._files]
        fds = [theirs.fileno() for _, theirs in ends]
        self._orders.send_each("open_copy_stream", fds, number, direction)
        for _, theirs in ends:
            theirs.close()
        links = [ours for ours, _ in ends]
        return LeaderCopyStream(
            number, own, links, self._orders, self.regions, self._copy_fences, self._fences.__next__
        )


class _GroupFence:
    """A fence on all ranks."""

    def __init__(self, own: Fence, number: int, orders: OrderBook) -> None:
        self.own = own
        self.number = number
        self._orders = orders

    def record(self) -> None:
        self._orders.send("record_fence", self.number)
        self.own.record()

    def wait(self) -> None:
        """Wait for the leader's kernels; a follower waits for its own when it unmaps."""
        self.own.wait()

    def close(self) -> None:
        self._orders.send("close_fence", self.number)
        self.own.close()
