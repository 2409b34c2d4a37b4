"""The device of a group's leader: orders to memory are carried out on all ranks.

All ranks have equally many pages of equal size, and each model's regions have the same size on each
rank. So the leader's accounts of pages, extents and host slots hold for all ranks.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeVar, cast

from gpupoold.errors import Failed
from gpupoold.memory.contracts import CopyStream, Device, Direction, Fence, PageRun
from gpupoold.memory.group.copy_stream import Fences, LeaderCopyStream
from gpupoold.memory.group.link import Link
from gpupoold.memory.group.orders import OrderBook
from gpupoold.memory.group.regions import LeaderRegions, PlacedMapping

_Method = TypeVar("_Method", bound=Callable[..., None])

# Attributes of the leader's own device that hold for the group.
_OWN = (
    *("page_bytes", "is_host_addressable", "piece_bytes", "load_slack_bytes", "has_link"),
    *("table_pages", "copy_batch_bytes", "numa_node"),
)
# Parameters of a device's methods that are addresses.
_ADDRESSES = ("address", "source", "target")


def _on_all_ranks(method: _Method) -> _Method:
    """Return a method of :class:`GroupDevice` that calls ``method`` of all ranks' devices."""
    names = list(signature(method).parameters)[1:]

    def call(self: GroupDevice, *arguments: Any, **options: Any) -> None:
        self._everywhere(method.__name__, dict(zip(names, arguments, strict=False)) | options)

    return cast(_Method, call)


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
        self.orders = orders
        self._files = files
        self.regions = LeaderRegions()
        self._sending, self._calling = threading.Lock(), threading.Lock()
        self._fences = itertools.count(1)
        self._copy_fences = Fences()
        self._streams = itertools.count(1)
        self.spent = own.spent
        self.num_pages = num_pages
        for name in _OWN:
            setattr(self, name, getattr(own, name))
        self.num_ranks = len(orders.links) + 1

    map = _on_all_ranks(Device.map)
    map_and_fill = _on_all_ranks(Device.map_and_fill)
    zero = _on_all_ranks(Device.zero)
    copy_in = _on_all_ranks(Device.copy_in)
    copy_out = _on_all_ranks(Device.copy_out)
    copy_in_host = _on_all_ranks(Device.copy_in_host)
    release_memory = _on_all_ranks(Device.release_memory)
    reclaim = _on_all_ranks(Device.reclaim)

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
            self.orders.send("close_region", number)
        self._own.release(address, num_pages)

    def unmap_each(
        self, mappings: Sequence[tuple[int, list[PageRun]]], last_use: Fence | None = None
    ) -> None:
        assert last_use is None or isinstance(last_use, _GroupFence)
        placed = [(self.regions.place(address), runs) for address, runs in mappings]
        found: list[PlacedMapping] = [(at, runs) for at, runs in placed if at is not None]
        if found:
            self.orders.send("unmap", found, last_use.number if last_use is not None else 0)
        self._own.unmap_each(mappings, last_use.own if last_use is not None else None)

    def open_fence(self) -> Fence:
        return _GroupFence(self._own.open_fence(), next(self._fences), self.orders)

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
        self.orders.send("on_device", "synchronize", {})
        self.orders.wait()

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin the leader's memory; followers pin their own in ``map_host`` and in a load."""
        self._own.pin(address, num_bytes)

    def unpin(self, address: int, num_bytes: int) -> None:
        number = self.regions.pop(address)
        if number is not None:
            self._send_files("close_region", number)
        self._own.unpin(address, num_bytes)

    def close(self) -> None:
        self._own.close()

    def _everywhere(self, method: str, arguments: dict[str, Any]) -> None:
        """Call a method on all ranks, or on the leader if the addresses are in no region.

        An ordered mapping is undone after an error of the leader.
        """
        addresses = {n: arguments[n] for n in _ADDRESSES if arguments.get(n) is not None}
        found = {name: self.regions.place(address) for name, address in addresses.items()}
        places = {name: place for name, place in found.items() if place is not None}
        assert not places or len(places) == len(found), "the ranks share one address of a call only"
        is_ordered = len(places) == len(found)
        if is_ordered:
            self.orders.send("on_device", method, arguments | places)
        try:
            getattr(self._own, method)(**arguments)
        except BaseException:
            if is_ordered and "runs" in arguments and places:
                self.orders.send("unmap", [(places["address"], arguments["runs"])], 0)
            raise

    def _send_files(self, method: str, *arguments: Any, fds: Sequence[int] = ()) -> None:
        with self._sending:
            for link in self._files:
                link.send((self.orders.num_sent, method, arguments), fds)

    def _open(self, direction: Direction, own: CopyStream) -> CopyStream:
        number = next(self._streams)
        ends = [Link.pair() for _ in self._files]
        fds = [theirs.fileno() for _, theirs in ends]
        self.orders.send_each("open_copy_stream", fds, number, direction)
        for _, theirs in ends:
            theirs.close()
        links = [ours for ours, _ in ends]
        return LeaderCopyStream(
            number, own, links, self.orders, self.regions, self._copy_fences, self._fences.__next__
        )


@dataclass(frozen=True, slots=True)
class _GroupFence(Fence):
    """A fence on all ranks."""

    own: Fence
    number: int
    orders: OrderBook

    def record(self) -> None:
        self.orders.send("record_fence", self.number)
        self.own.record()

    def wait(self) -> None:
        """Wait for the leader's kernels; a follower waits for its own when it unmaps."""
        self.own.wait()

    def close(self) -> None:
        self.orders.send("close_fence", self.number)
        self.own.close()
