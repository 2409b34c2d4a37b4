"""A copy stream of a group: the same copies on every rank, each over its own link."""

from __future__ import annotations

import select
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpupoold.errors import Failed
from gpupoold.memory.contracts import Copy, CopyStream
from gpupoold.memory.group.link import Link, RankLost
from gpupoold.memory.group.orders import OrderBook, OrderCount
from gpupoold.memory.group.regions import FollowerRegions, LeaderRegions, RegionPlace

_MAX_FENCES = 4096
_MAX_UNDER_WAY = 2

PlacedCopy = tuple[RegionPlace, RegionPlace, int]


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

        Raises:
            Failed: more fences than the limit were recorded since.
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
