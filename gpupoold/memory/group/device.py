"""The device of a group: the leader's orders to memory are carried out on all ranks.

All ranks have equally many pages of equal size, and each model's regions have the same size on each
rank. So the leader's accounts of pages, extents and host slots hold for all ranks.
"""

from __future__ import annotations

import functools
import itertools
import select
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple, TypeVar, cast

from gpupoold.errors import Failed
from gpupoold.memory.device import Copy, CopyStream, Device, Direction, Fence, Unpinned
from gpupoold.memory.group.link import Link, OrderBook, OrderCount, RankLost
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.pages import PageRun

_Method = TypeVar("_Method", bound=Callable[..., None])

_MAX_FENCES = 4096
_MAX_UNDER_WAY = 2
# Attributes of the leader's own device that hold for the group.
_OWN = (
    *("page_bytes", "is_host_addressable", "piece_bytes", "load_slack_bytes", "has_link"),
    *("table_pages", "copy_batch_bytes"),
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
        self,
        own: Device,
        orders: OrderBook,
        files: Sequence[Link],
        num_pages: int,
        rank_nodes: Sequence[int],
        unpinned: memoryview,
    ) -> None:
        """``files`` are links to threads that map and pin host memory.

        ``num_pages`` is the least number of pages of a rank; ``unpinned`` has the bytes that are
        not pinned, by rank.
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
        self.num_pages, self.rank_nodes = num_pages, rank_nodes
        self._unpinned = unpinned
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
    stage_far_memory = _on_all_ranks(Device.stage_far_memory)

    def share_host(self, address: int, num_bytes: int, fd: int) -> None:
        number = self.regions.new_number()
        self.call_files("map_host", number, num_bytes, fds=[fd])
        self.regions.add(number, address, num_bytes)

    def call_files(self, method: str, *arguments: Any, fds: Sequence[int] = ()) -> None:
        """Call a method on the followers' threads for files, and wait for its end.

        Raises Failed: the text of a follower's error.
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

    def pin_later(self, address: int, num_bytes: int) -> None:
        self._own.pin_later(address, num_bytes)

    def set_live(self, is_live: bool) -> None:
        self._own.set_live(is_live)

    def unpinned(self) -> Unpinned:
        """Return a rank's unpinned bytes on average, and the leader's reason."""
        own = self._own.unpinned()
        return Unpinned((own.num_bytes + sum(self._unpinned[1:])) // self.num_ranks, own.problem)

    def wait_for_driver(self) -> None:
        self._own.wait_for_driver()

    def unpin(self, address: int, num_bytes: int) -> None:
        self._close_shared(address)
        self._own.unpin(address, num_bytes)

    def unpin_later(self, address: int, num_bytes: int, then: Callable[[], None]) -> None:
        self._close_shared(address)
        self._own.unpin_later(address, num_bytes, then)

    def _close_shared(self, address: int) -> None:
        number = self.regions.pop(address)
        if number is not None:
            self._send_files("close_region", number)

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


class RegionPlace(NamedTuple):
    """An offset in bytes in a region.

    The leader translates its addresses into regions and offsets, each follower translates these
    into its own addresses.
    """

    region: int
    offset: int


PlacedMapping = tuple[RegionPlace, list[PageRun]]
"""The place from which runs are mapped one after the other."""
PlacedCopy = tuple[RegionPlace, RegionPlace, int]
"""Target, source and bytes of a copy."""


class LeaderRegions:
    """The regions by the leader's addresses, for all threads.

    Readers see a consistent list without a lock, because a change replaces the list.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._numbers = itertools.count(1)
        self._sorted: list[tuple[int, int, int]] = []  # address, bytes, number

    def new_number(self) -> int:
        """Return a number for a region that all ranks will register."""
        return next(self._numbers)

    def add(self, number: int, address: int, num_bytes: int) -> None:
        """Register a region, which every follower has registered."""
        with self._changing:
            self._sorted = sorted([*self._sorted, (address, num_bytes, number)])

    def pop(self, address: int) -> int | None:
        """Forget the region that begins at ``address``; return its number, None if unknown."""
        with self._changing:
            found = [entry for entry in self._sorted if entry[0] == address]
            if found:
                self._sorted = [entry for entry in self._sorted if entry[0] != address]
        return found[0][2] if found else None

    def place(self, address: int) -> RegionPlace | None:
        """Return the place of an address, None outside of all regions."""
        entries = self._sorted
        index = bisect_right(entries, (address, 1 << 64, 0)) - 1
        if index < 0:
            return None
        start, num_bytes, number = entries[index]
        return RegionPlace(number, address - start) if address - start < num_bytes else None


class _Region(NamedTuple):
    address: int
    close: Callable[[], None]


class FollowerRegions:
    """A follower's addresses of the regions, with functions that free each."""

    def __init__(self) -> None:
        self._regions: dict[int, _Region] = {}

    def add(self, number: int, address: int, close: Callable[[], None]) -> None:
        """Register a region; ``close`` frees the follower's range or buffer."""
        self._regions[number] = _Region(address, close)

    def address(self, place: RegionPlace) -> int:
        """Return the follower's address of a place."""
        return self._regions[place.region].address + place.offset

    def close_region(self, number: int) -> None:
        """Free a region, unless another thread has done so or the region is unknown."""
        region = self._regions.pop(number, None)
        if region is not None:
            region.close()


class RankFence(NamedTuple):
    """A rank's own fence; on the leader also the number of orders before and with the fence."""

    own: int
    num_orders: int = 0


class Fences:
    """Fences of all copy streams of a rank by the group's number.

    A fence applies to all copy streams of a direction, so that streams share this object. The
    latest 4096 can be waited for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fences: OrderedDict[int, RankFence] = OrderedDict()

    def add(self, number: int, fence: RankFence) -> None:
        with self._lock:
            self._fences[number] = fence
            while len(self._fences) > _MAX_FENCES:
                self._fences.popitem(last=False)

    def get(self, number: int) -> RankFence:
        """Return the fence of a number other than 0.

        Raises Failed: more fences than the limit were recorded since.
        """
        with self._lock:
            fence = self._fences.get(number)
        if fence is None:
            text = f"copies wait for fence {number}, which is not among the latest {_MAX_FENCES}"
            raise Failed(text, "restart the worker; this is an error of gpupool")
        return fence

    def own(self, number: int) -> int:
        """Return the own fence of a number, 0 for no fence. Raises Failed as ``get``."""
        return self.get(number).own if number else 0


@dataclass(eq=False, slots=True)
class LeaderCopyStream:
    """The leader's end: each batch goes to the followers' copy streams and to the leader's own.

    A batch with an address outside of all regions is copied by the leader alone, as in
    measurements. A follower begins a batch after the orders before the batch's fence, not after
    later ones: the batch may arrive during a step that was ordered after the fence.
    """

    number: int
    own: CopyStream
    links: Sequence[Link]
    orders: OrderBook
    regions: LeaderRegions
    fences: Fences
    next_fence: Callable[[], int]
    # Number, own number, with followers.
    _begun: deque[tuple[int, int, bool]] = field(default_factory=deque, init=False)
    _num_begun: int = field(default=0, init=False)

    def fence(self) -> int:
        number, own = self.next_fence(), self.own.fence()
        num_orders = self.orders.send("record_copy_fence", self.number, number)
        self.fences.add(number, RankFence(own, num_orders))
        return number

    def begin(self, copies: Sequence[Copy], after: int) -> int:
        placed = self._placed(copies)
        # Looked up before the followers begin, which record the same fences.
        fence = self.fences.get(after) if after else RankFence(0, self.orders.num_sent)
        if placed:
            for link in self.links:
                link.send((fence.num_orders, placed, after))
        own = self.own.begin(copies, fence.own)
        self._num_begun += 1
        self._begun.append((self._num_begun, own, bool(placed)))
        return self._num_begun

    def wait(self, batch: int) -> None:
        while self._begun and self._begun[0][0] <= batch:
            _, own, is_everywhere = self._begun.popleft()
            self.own.wait(own)
            if is_everywhere:
                for link in self.links:
                    link.receive()

    def close(self) -> None:
        for link in self.links:
            link.close()  # ends the followers' threads
        self.orders.send("forget_copy_stream", self.number)
        self.own.close()

    def _placed(self, copies: Sequence[Copy]) -> list[PlacedCopy]:
        placed: list[PlacedCopy] = []
        for target, source, num_bytes in copies:
            to, from_ = self.regions.place(target), self.regions.place(source)
            assert (to is None) == (from_ is None), "the ranks share one address of a copy only"
            if to is None or from_ is None:
                return []
            placed.append((to, from_, num_bytes))
        return placed


@dataclass(eq=False, slots=True)
class FollowerCopyStream:
    """A follower's end, with a thread that makes the batches and acknowledges each."""

    link: Link
    own: CopyStream
    regions: FollowerRegions
    fences: Fences
    done: OrderCount

    def record_fence(self, number: int) -> None:
        """Record a fence after all kernels launched so far, for the thread of orders."""
        self.fences.add(number, RankFence(self.own.fence()))

    def run(self) -> None:
        """Make copies until the leader closes the copy stream."""
        under_way: deque[int] = deque()
        try:
            while True:
                is_full = len(under_way) == _MAX_UNDER_WAY
                if is_full or (under_way and not select.select([self.link], [], [], 0)[0]):
                    self.own.wait(under_way.popleft())
                    self.link.send(None)
                    continue
                (num_orders, placed, after), _ = self.link.receive()
                self.done.wait_for(num_orders)
                copies = [
                    Copy(self.regions.address(to), self.regions.address(from_), num_bytes)
                    for to, from_, num_bytes in placed
                ]
                under_way.append(self.own.begin(copies, self.fences.own(after)))
        except RankLost:
            self.own.close()
            self.link.close()


class FollowerMemory:
    """The methods that the leader's device orders; see :class:`GroupDevice` for each."""

    def __init__(self, device: Device, rank: int, done: OrderCount) -> None:
        self._device = device
        self._rank = rank
        self._done = done
        self._fences: dict[int, Fence] = {}
        self._copy_fences = Fences()
        self._copy_streams: dict[int, FollowerCopyStream] = {}
        self.regions = FollowerRegions()

    def on_device(self, method: str, arguments: dict[str, Any]) -> None:
        """Call a method of the device, with addresses for places."""
        for name, value in arguments.items():
            if isinstance(value, RegionPlace):
                arguments[name] = self.regions.address(value)
        getattr(self._device, method)(**arguments)

    def unmap(self, mappings: Sequence[PlacedMapping], fence: int) -> None:
        last_use = self._fences.get(fence)
        addressed = [(self.regions.address(place), runs) for place, runs in mappings]
        self._device.unmap_each(addressed, last_use)

    def record_fence(self, number: int) -> None:
        if number not in self._fences:
            self._fences[number] = self._device.open_fence()
        self._fences[number].record()

    def close_fence(self, number: int) -> None:
        fence = self._fences.pop(number, None)
        if fence is not None:
            fence.close()

    def open_copy_stream(self, number: int, direction: Direction, fd: int) -> None:
        own = self._device.open_copy_stream(direction)
        stream = FollowerCopyStream(Link.of(fd), own, self.regions, self._copy_fences, self._done)
        self._copy_streams[number] = stream
        threading.Thread(target=stream.run, name="copy", daemon=True).start()

    def forget_copy_stream(self, number: int) -> None:
        """Forget a copy stream that the leader has closed, whose thread ends by itself."""
        del self._copy_streams[number]  # closed by the leader; its thread ends by itself

    def record_copy_fence(self, stream: int, number: int) -> None:
        self._copy_streams[stream].record_fence(number)

    def map_host(self, number: int, num_bytes: int, fd: int) -> None:
        """Map this rank's part of shared host memory, as a region."""
        buffer = HostBuffer(fd, num_bytes, self._rank * num_bytes, is_populated=False)
        self.pin_host(number, buffer)

    def pin_host(self, number: int, buffer: HostBuffer) -> None:
        """Register a buffer as a region that owns the buffer, and is pinned in idle moments."""
        self._device.pin_later(buffer.address, buffer.num_bytes)
        unpin = functools.partial(
            self._device.unpin_later, buffer.address, buffer.num_bytes, buffer.close
        )
        self.regions.add(number, buffer.address, unpin)
