"""The parts of a group of GPUs, one after the other, without an engine.

The ranks join vLLM's process groups; pin their parts of one memfd; map pages and fill these by the
leader's orders; add tensors with vLLM's all-reduce, on a GPU also in a CUDA graph whose weights are
replaced below constant addresses; and copy back by copy streams, alone and beside all-reduces. The
first part that fails is named by the last figure in the report.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import figures, machine
from benchmarks.gpu.rig import Setting, arguments, setting_of
from gpupoold.doctor.facts import GpuFacts
from gpupoold.doctor.probe_gpu import gpu_facts
from gpupoold.memory.device import AddressRange, Copy, Direction
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.libc import create_memfd
from gpupoold.memory.pages import PagePool
from gpupoold.memory.transfers import TransferQueue
from gpupoold.worker.process import Rank, fork_ranks, set_engine_environment

if TYPE_CHECKING:
    from benchmarks.gpu.group_rank import RankWork
    from gpupoold.memory.group.device import GroupDevice
    from gpupoold.memory.group.link import OrderBook

_BYTES = 256 << 20
_DRY_BYTES = 4 << 20
_ROUNDS = 50
_DRY_ROUNDS = 5
# A step of one token of an 8B model, and a prompt of 512 tokens.
_SIZES = {"8KiB": 8 << 10, "4MiB": 4 << 20}
_FILLS = (1, 5, 3)


class Parts:
    """The leader's side of every part; each method adds its figures to the report."""

    def __init__(
        self, setting: Setting, device: GroupDevice, orders: OrderBook, work: RankWork
    ) -> None:
        self._setting = setting
        self._device = device
        self._orders = orders
        self._work = work
        self._num_ranks = device.num_ranks
        num_bytes = _bytes_of(setting)
        self._num_pages = num_bytes // device.page_bytes
        self._num_bytes = self._num_pages * device.page_bytes
        self._pool = PagePool(device.num_pages, device.table_pages)
        self._stack = contextlib.ExitStack()

    def run(self) -> None:
        """All parts in order."""
        with self._stack:
            sources = {value: self._host(value) for value in _FILLS}
            target = self._host(0)
            weights = self._range()
            self._fill(weights, sources)
            weights.retain(range(self._num_pages), sources[_FILLS[0]].address)
            self._copy_out(weights, target)
            self._time_all_reduces(weights, target)

    def _host(self, value: int) -> HostBuffer:
        """Host memory with a part for each rank: floats of ``value`` and the rank; pinned."""
        fd = create_memfd("gpupool-group-start", self._num_bytes * self._num_ranks)
        for rank in range(self._num_ranks):
            content = self._work.content(value, rank, self._num_bytes)
            os.pwrite(fd, content, rank * self._num_bytes)
        buffer = HostBuffer(fd, self._num_bytes)
        self._stack.callback(buffer.close)
        started_s = time.perf_counter()
        self._device.pin(buffer.address, buffer.num_bytes)
        self._stack.callback(self._device.unpin, buffer.address, buffer.num_bytes)
        self._device.share_host(buffer.address, buffer.num_bytes, fd)
        rate = self._num_ranks * self._num_bytes / (time.perf_counter() - started_s)
        self._add("pinned_bytes_per_s", figures.measured(rate))
        return buffer

    def _range(self) -> AddressRange:
        """An address range on all ranks, as of a model's weights."""
        found = AddressRange(self._device, self._pool, self._num_pages)
        self._stack.callback(found.close)
        number = self._device.regions.new_number()
        self._orders.send("reserve", number, self._num_pages)
        self._device.regions.add(number, found.address, self._num_bytes)
        self._work.place(found.address, self._num_bytes)
        return found

    def _fill(self, weights: AddressRange, sources: dict[int, HostBuffer]) -> None:
        """Replace the bytes below constant addresses, with other pages each time."""
        pages, rates = range(self._num_pages), []
        kept: list[AddressRange] = []
        for value, source in sources.items():
            started_s = time.perf_counter()
            weights.retain(pages, source.address)
            self._device.synchronize()
            self._device.wait_for_ranks()
            rates.append(self._num_bytes / (time.perf_counter() - started_s))
            self._everywhere("check_sum", value)
            weights.drop(pages)
            # Takes the pages that the range had.
            other = AddressRange(self._device, self._pool, self._num_pages // 4 or 1)
            self._stack.callback(other.close)
            other.retain(range(other.num_pages))
            kept.append(other)
        for other in kept:
            other.drop(range(other.num_pages))
        self._device.wait_for_ranks()
        self._add("filled_bytes_per_s", figures.measured(median(rates)))
        self._add("sums_differing", figures.at_most(self._work.num_differing(), 0))

    def _copy_out(self, weights: AddressRange, target: HostBuffer) -> None:
        """Copy each rank's bytes to its part of ``target``, and compare all parts."""
        queue = TransferQueue.open(self._device, Direction.OUT, "group-out")
        self._stack.callback(queue.close)
        started_s = time.perf_counter()
        queue.begin([Copy(target.address, weights.address, self._num_bytes)]).wait()
        rate = self._num_bytes / (time.perf_counter() - started_s)
        num_differing = 0
        for rank in range(self._num_ranks):
            found = os.pread(target.fd, self._num_bytes, rank * self._num_bytes)
            num_differing += found != self._work.content(_FILLS[0], rank, self._num_bytes)
        self._add("copied_out_bytes_per_s", figures.measured(rate))
        self._add("parts_differing", figures.at_most(num_differing, 0))

    def _time_all_reduces(self, weights: AddressRange, target: HostBuffer) -> None:
        """The time of an all-reduce, alone and beside copies over the link of every rank."""
        rounds = _DRY_ROUNDS if self._setting.is_dry else _ROUNDS
        queue = TransferQueue.open(self._device, Direction.OUT, "group-beside")
        self._stack.callback(queue.close)
        for name, num_bytes in _SIZES.items():
            self._everywhere("time_all_reduces", num_bytes, rounds)
            alone_s = self._work.all_reduce_s
            transfer = queue.begin([Copy(target.address, weights.address, self._num_bytes)])
            self._everywhere("time_all_reduces", num_bytes, rounds)
            transfer.wait()
            self._add(f"all_reduce_of_{name}_s", figures.measured(alone_s))
            beside_s = self._work.all_reduce_s
            self._add(f"all_reduce_of_{name}_beside_copies_s", figures.measured(beside_s))
        self._device.wait_for_ranks()

    def _everywhere(self, method: str, *given: Any) -> None:
        """Call a method of every rank's work, at the same time."""
        self._orders.send(method, *given)
        getattr(self._work, method)(*given)
        self._device.wait_for_ranks()

    def _add(self, name: str, figure: figures.Figure) -> None:
        self._setting.report.add({self._setting.label(name): figure})


def _bytes_of(setting: Setting) -> int:
    """Bytes of the weights on each GPU."""
    return setting.dry_bytes(_DRY_BYTES) if setting.is_dry else _BYTES


def run(setting: Setting) -> None:
    """Report the topology, then start the ranks and go through the parts."""
    topology = [machine.link_row(link) for link in gpu_facts().links]
    started_s = time.monotonic()
    shared = mmap.mmap(-1, mmap.PAGESIZE)  # of all ranks
    rank = fork_ranks(setting.num_gpus, [])
    try:
        with _opened(setting, rank, shared) as (device, orders, work):
            label = setting.label("start")
            found = {f"{label}_s": figures.measured(time.monotonic() - started_s)}
            found |= topology_figures(setting.label("least"), gpu_facts(), setting.num_gpus)
            setting.report.add(found, topology=topology, all_reduces=work.backends())
            Parts(setting, device, orders, work).run()
    finally:
        rank.followers.kill()


def topology_figures(label: str, facts: GpuFacts, num_gpus: int) -> dict[str, figures.Figure]:
    """The fewest NVLinks between two of the first GPUs; nothing where NVML does not tell."""
    links = [link.num_nvlinks for link in facts.links if max(link.first, link.second) < num_gpus]
    return {f"{label}_nvlinks": figures.measured(min(links))} if links else {}


@contextlib.contextmanager
def _opened(
    setting: Setting, rank: Rank, shared: mmap.mmap
) -> Iterator[tuple[GroupDevice, OrderBook, RankWork]]:
    """Open the rank's device and join the group; a follower stays here until the leader ends."""
    set_engine_environment("warning")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # After the fork: CUDA and torch's threads do not survive a fork.
    from benchmarks.gpu.group_rank import follow, open_rank
    from gpupoold.memory.group.device import GroupDevice
    from gpupoold.worker.weights.rank_loads import lead

    device_bytes = 3 * _bytes_of(setting)
    own, work = open_rank(rank, device_bytes, shared, is_emulated=setting.is_emulated)
    if rank.rank:
        follow(rank, own, work)
    device, links = lead(rank, own)
    assert isinstance(device, GroupDevice)
    yield device, links.orders, work


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; see the module."""
    run(setting_of(arguments(__doc__).parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
