"""Loads of a model by the ranks of a group, each its shard.

All ranks run vLLM's load side by side. The leader decides what must be equal: the snapshot, whose
memfd has a part for each rank, and the numbers of the regions.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from gpupoold.errors import Failed
from gpupoold.memory.device import AddressRange, Device
from gpupoold.memory.group.device import FollowerMemory, GroupDevice
from gpupoold.memory.group.link import Link, OrderBook, OrderCount
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.worker.process import Rank
from gpupoold.worker.threads import TurnThread
from gpupoold.worker.weights.loading import ModelLoad
from gpupoold.worker.weights.reading import HostLoadFails
from gpupoold.worker.weights.tensors import WeightLayout

if TYPE_CHECKING:
    import torch


_P = ParamSpec("_P")
_T = TypeVar("_T")
_HOLD = "hold"


class RankFailed(Failed):
    """Another rank could not load its shard."""


class AnswerKind(Enum):
    """Whether a follower's answer is the end of a call, or of a load."""

    VALUE = auto()
    ERROR = auto()
    HOST_LOAD_FAILS = auto()
    ENDED = auto()


class Answer(NamedTuple):
    """A follower's answer on its link for loads; the text of an error."""

    kind: AnswerKind
    value: Any = None


class ShardShape(NamedTuple):
    """What the ranks compare: the digest of a shard, the bytes of weights and of slots, the ends of
    the layers, and whether the weights are in the snapshot."""

    digest: str
    num_bytes: int
    slot_bytes: int
    layer_ends: tuple[int, ...]
    is_in_place: bool

    @classmethod
    def of(cls, layout: WeightLayout, slots: WeightLayout, *, is_in_place: bool) -> ShardShape:
        """Return the shape of this rank's shard."""
        sizes = (layout.num_bytes, slots.num_bytes)
        return cls(layout.digest, *sizes, layout.layer_ends, is_in_place)


class RegionNumbers(NamedTuple):
    """The numbers of a model's regions."""

    weights: int
    snapshot: int
    slots: int
    kv: int


@dataclass(eq=False, slots=True)
class LoadLinks:
    """The leader's links to the followers' threads of loads, for the leader's thread of loads."""

    links: Sequence[Link]
    orders: OrderBook
    _num_engines: int = field(default=0, init=False)

    def new_engine(self) -> int:
        """Return a number for an engine."""
        self._num_engines += 1
        return self._num_engines

    def send(self, method: str, *arguments: Any, fds: Sequence[int] = ()) -> None:
        """Call a method on all followers, or send what a called method waits for."""
        for link in self.links:
            link.send((self.orders.num_sent, method, arguments), fds)

    def receive(self) -> list[Any]:
        """Return the next answer of each follower.

        Raises:
            RankFailed: a follower answered with an error.
            HostLoadFails: a follower answered with this error.
        """
        received = [link.receive()[0] for link in self.links]
        failed = [
            f"rank {rank}: {answer.value}"
            for rank, answer in enumerate(received, 1)
            if answer.kind is not AnswerKind.VALUE
        ]
        if any(answer.kind is AnswerKind.HOST_LOAD_FAILS for answer in received):
            raise HostLoadFails("; ".join(failed))
        if failed:
            raise RankFailed("; ".join(failed))
        return [answer.value for answer in received]

    def end_load(self, engine: int, *, is_loaded: bool) -> None:
        """End a load on all followers; after a failure, skip answers to earlier calls."""
        self.send("end_load", engine, is_loaded)
        for link in self.links:
            while link.receive()[0].kind is not AnswerKind.ENDED:
                pass


class LeaderTurns(TurnThread):
    """The leader's turn thread ``turns``, and the followers' threads of orders with it.

    While a load holds the turn thread, the same load of each follower holds its thread of orders,
    so that collectives of the load come between the same steps on all ranks.
    """

    def __init__(self, turns: TurnThread, orders: OrderBook) -> None:
        super().__init__(turns.slice_limit_s)
        self._turns = turns
        self._orders = orders

    def call(self, job: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._turns.call(job, *args, **kwargs)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with self._turns.held():
            self._orders.send(_HOLD)
            yield

    def give_way(self) -> None:
        self._turns.give_way()
        self._orders.send(_HOLD)


class FollowerTurns(TurnThread):
    """A follower's thread of orders, held by its load as the leader's turn thread is."""

    def __init__(self) -> None:
        super().__init__()
        self._may_run = threading.Semaphore(0)
        self._may_go_on = threading.Semaphore(0)

    def hold(self) -> None:
        """Let the load run until it gives way or ends; for the thread of orders."""
        self._may_run.release()
        self._may_go_on.acquire()

    def call(self, job: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return job(*args, **kwargs)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._may_run.acquire()
        try:
            yield
        finally:
            self._may_go_on.release()

    def give_way(self) -> None:
        self._may_go_on.release()
        self._may_run.acquire()


class LeaderLoad(ModelLoad):
    """The leader's part of a load."""

    def __init__(self, *arguments: Any, links: LoadLinks, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert isinstance(self.device, GroupDevice)
        self.group: GroupDevice = self.device
        self.turns = LeaderTurns(self.turns, links.orders)
        self.links = links
        self.engine = links.new_engine()
        new_number = self.group.regions.new_number
        self._numbers = RegionNumbers(new_number(), new_number(), new_number(), new_number())
        self.is_under_way = False
        """True until all ranks have ended the load."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        what = (self.name, self.skips_checkpoint, self._why_on_device)
        self.links.send("begin_load", self.engine, *what)
        self.is_under_way = True
        try:
            with super().active():
                yield
        except BaseException:
            self._end(is_loaded=False)
            raise
        self._end(is_loaded=True)

    def bring_weights(self) -> None:
        super().bring_weights()
        self.links.send("go_on")  # after the orders sent before

    @contextlib.contextmanager
    def _scratch(self, address_range: AddressRange | None) -> Iterator[None]:
        with super()._scratch(address_range):
            self.links.send("go_on")  # after the orders sent before
            yield
            self.links.receive()

    def _release_to_torch(self, num_pages: int) -> None:
        super()._release_to_torch(num_pages)
        self.links.send("go_on")  # after the orders sent before

    def _common_reason(self, reason: str) -> str:
        common = next(filter(None, (reason, *self.links.receive())), "")
        self.links.send("read", common)
        return common

    def _snapshot_in_place(self, layout: WeightLayout) -> HostBuffer:
        snapshot = super()._snapshot_in_place(layout)
        self.links.send("place", snapshot.num_bytes, fds=[snapshot.fd])
        return snapshot

    def share_kv(self) -> None:
        """Let orders about the KV range reach the followers, whose ranges exist."""
        if self.kv_address_range is not None:
            num_bytes = self.kv_address_range.num_pages * self.device.page_bytes
            self.group.regions.add(self._numbers.kv, self.kv_address_range.address, num_bytes)

    def _agree(self, layout: WeightLayout, slots: WeightLayout) -> WeightLayout:
        shapes = [ShardShape.of(layout, slots, is_in_place=self.is_in_place), *self.links.receive()]
        if len({shape.is_in_place for shape in shapes}) > 1:
            raise HostLoadFails("vLLM moved the weights of some ranks only")
        sizes = {(shape.num_bytes, shape.slot_bytes) for shape in shapes}
        if len(sizes) > 1:
            text = f"{self.name}: the shards have different sizes: {sorted(sizes)}"
            raise Failed(text, "host the model on single GPUs")
        digests = "".join(shape.digest for shape in shapes)
        ends = zip(*(shape.layer_ends for shape in shapes), strict=True)
        return replace(
            layout,
            digest=hashlib.sha256(digests.encode()).hexdigest(),
            layer_ends=tuple(map(max, ends)),
        )

    def _usable_snapshot(self, layout: WeightLayout, num_pages: int) -> tuple[HostBuffer, bool]:
        snapshot, is_new = super()._usable_snapshot(layout, num_pages)
        answer = (is_new, snapshot.num_bytes, self._numbers)
        self.links.send("snapshot", *answer, fds=[snapshot.fd])
        return snapshot, is_new

    def _placed(self) -> None:
        self.links.receive()
        assert self.weights is not None
        regions, numbers = self.group.regions, self._numbers
        regions.add(numbers.weights, self.weights.address, self.weights.num_bytes)
        snapshot, own = self.weights.snapshot, self.weights.own
        regions.add(numbers.snapshot, snapshot.address, snapshot.num_bytes)
        if own is not None:
            regions.add(numbers.slots, own.address, own.num_bytes)

    def _reclaim(self, failure: BaseException | None = None) -> None:
        if failure is None:  # the followers' memory is reclaimed too
            self.links.receive()
        else:
            self._end(is_loaded=False)
        super()._reclaim(failure)

    def _end(self, *, is_loaded: bool) -> None:
        if self.is_under_way:
            self.is_under_way = False
            self.links.end_load(self.engine, is_loaded=is_loaded)


class FollowerLoad(ModelLoad):
    """A follower's part of a load; the leader maps the pages."""

    def __init__(
        self,
        *arguments: Any,
        link: Link,
        memory: FollowerMemory,
        done: OrderCount,
        rank: int,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._link = link
        self._memory = memory
        self._done = done
        self._rank = rank
        self._numbers: RegionNumbers | None = None
        self.unexpected: tuple[str, Any] | None = None
        """A message that came instead of an expected one."""
        self.weights_address = self.weights_bytes = 0

    def bring_weights(self) -> None:
        self.receive("go_on")

    @contextlib.contextmanager
    def _scratch(self, address_range: AddressRange | None) -> Iterator[None]:
        self.receive("go_on")
        yield
        self.answer(None)

    def _release_to_torch(self, num_pages: int) -> None:
        self.receive("go_on")

    def _common_reason(self, reason: str) -> str:
        self.answer(reason)
        [common], _ = self.receive("read")
        return str(common)

    def _snapshot_in_place(self, layout: WeightLayout) -> HostBuffer:
        [num_bytes], [fd] = self.receive("place")
        return self._part(fd, num_bytes, is_populated=False)

    def make_kv(self, num_bytes: int) -> torch.Tensor:
        tensor = super().make_kv(num_bytes)
        assert self._numbers is not None and self.kv_address_range is not None
        address_range = self.kv_address_range
        self._memory.regions.add(self._numbers.kv, address_range.address, address_range.close)
        self.kv_address_range = None
        return tensor

    def receive(self, method: str) -> tuple[Any, list[int]]:
        """Wait for a message of the leader in the middle of a call.

        Raises:
            RankFailed: the leader sent something else, because its part has failed.
        """
        (num_orders, sent, arguments), fds = self._link.receive()
        if sent != method:
            self.unexpected = (sent, arguments)
            raise RankFailed(f"the leader sent {sent} instead of {method}")
        self._done.wait_for(num_orders)
        return arguments, fds

    def answer(self, value: Any) -> None:
        """Answer the leader in the middle of a call."""
        self._link.send(Answer(AnswerKind.VALUE, value))

    def _reclaim(self, failure: BaseException | None = None) -> None:
        self._release.drop_garbage(failure)
        if failure is None:
            self.answer(None)

    def _give_back(self) -> None:
        for number in self._numbers or ():
            self._memory.regions.close_region(number)
        super()._give_back()

    def _agree(self, layout: WeightLayout, slots: WeightLayout) -> WeightLayout:
        self.answer(ShardShape.of(layout, slots, is_in_place=self.is_in_place))
        return layout

    def _usable_snapshot(self, layout: WeightLayout, num_pages: int) -> tuple[HostBuffer, bool]:
        (is_new, num_bytes, numbers), [fd] = self.receive("snapshot")
        self._numbers = RegionNumbers(*numbers)
        if self._snapshot is not None and self.is_in_place:
            os.close(fd)
            return self._snapshot, is_new
        return self._part(fd, num_bytes, is_populated=not (is_new and self.is_on_host)), is_new

    def _part(self, fd: int, num_bytes: int, *, is_populated: bool) -> HostBuffer:
        """Return this rank's part of the snapshot."""
        offset = self._rank * num_bytes
        return HostBuffer(fd, num_bytes, offset, is_populated=is_populated)

    def _hold(
        self, address_range: AddressRange, snapshot: HostBuffer, own: HostBuffer | None
    ) -> None:
        assert self._numbers is not None
        self._snapshot = None  # owned by its region
        self._memory.pin_host(self._numbers.snapshot, snapshot)
        if own is not None:
            self._memory.pin_host(self._numbers.slots, own)
        self.weights_address = address_range.address
        self.weights_bytes = address_range.num_pages * self.device.page_bytes
        regions = self._memory.regions
        regions.add(self._numbers.weights, address_range.address, address_range.close)

    def _placed(self) -> None:
        self.answer(None)


def lead(rank: Rank, own: Device) -> tuple[Device, LoadLinks]:
    """Return the group's device, whose pages all ranks have, when all ranks are ready.

    Raises:
        RankLost: a follower has ended.
    """
    ranks = [(own.num_pages, *own.rank_nodes)]
    ranks += [links.orders.receive()[0] for links in rank.links]
    num_pages, nodes = zip(*ranks, strict=True)
    orders = OrderBook([links.orders for links in rank.links])
    files = [links.files for links in rank.links]
    device = GroupDevice(own, orders, files, min(num_pages), nodes, rank.unpinned)
    return device, LoadLinks([links.loads for links in rank.links], orders)
