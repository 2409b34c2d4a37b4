"""A rank of ``group_start``: a device, and what every rank computes."""

from __future__ import annotations

import functools
import mmap
import os
import struct
import threading
import time
from statistics import median
from typing import Any, NoReturn

import torch
from vllm.distributed import parallel_state, tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import graph_capture

from gpupoold.memory.device import Device
from gpupoold.memory.group.device import FollowerMemory
from gpupoold.memory.group.link import OrderCount, RankLost, run_files, run_orders
from gpupoold.worker.device import open_device
from gpupoold.worker.engine.vllm_process import join_group, keep_generators
from gpupoold.worker.process import Rank
from gpupoold.worker.weights.tensors import over

# Elements whose sum over the ranks is compared, at the begin of the weights.
_NUM_SUMMED = 4096
_COUNT = struct.Struct("=q")
_RESERVE_BYTES = 2 << 30


class RankWork:
    """The rank's weights, and sums over all ranks; a receiver of the leader's orders.

    ``shared`` has a number of differing elements for each rank.
    """

    def __init__(self, rank: Rank, device: Device, shared: mmap.mmap) -> None:
        self._rank = rank
        self._device = device
        self._shared = shared
        self._weights: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        self._graph: Any = None
        self.memory: FollowerMemory | None = None
        self.all_reduce_s = 0.0

    @staticmethod
    def content(value: int, rank: int, num_bytes: int) -> bytes:
        """The bytes of a rank's part: floats of ``value`` and the rank together."""
        return struct.pack("=f", value + rank) * (num_bytes // 4)

    def reserve(self, number: int, num_pages: int) -> None:
        """Reserve a follower's range of weights, as a region."""
        assert self.memory is not None
        address = self._device.reserve(num_pages)
        close = functools.partial(self._device.release, address, num_pages)
        self.memory.regions.add(number, address, close)
        self.place(address, num_pages * self._device.page_bytes)

    def place(self, address: int, num_bytes: int) -> None:
        """Take the weights at this address, which may get pages later."""
        self._weights = over(self._device, address, num_bytes).view(torch.float32)

    def check_sum(self, value: int) -> None:
        """Add the weights of all ranks, which have ``value`` and the rank each; on a GPU by a graph
        that is captured once and reads whatever is at the address."""
        self._add_up()
        num_ranks = self._rank.num_ranks
        expected = num_ranks * value + num_ranks * (num_ranks - 1) // 2
        assert self._sum is not None
        differing = int((self._sum != expected).sum().item())
        at = self._rank.rank * _COUNT.size
        [before] = _COUNT.unpack_from(self._shared, at)
        _COUNT.pack_into(self._shared, at, before + differing)

    def num_differing(self) -> int:
        """The differing elements of all sums on all ranks so far."""
        return sum(
            _COUNT.unpack_from(self._shared, rank * _COUNT.size)[0]
            for rank in range(self._rank.num_ranks)
        )

    def time_all_reduces(self, num_bytes: int, rounds: int) -> None:
        """Set ``all_reduce_s``, the median time of an all-reduce of so many bytes in bfloat16."""
        given = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=self._torch_device)
        run: Any = functools.partial(tensor_model_parallel_all_reduce, given)
        if not self._device.is_host_addressable:
            run = self._captured(run)[0].replay
        seconds = []
        for _ in range(rounds):
            self._wait()
            started_s = time.perf_counter()
            run()
            self._wait()
            seconds.append(time.perf_counter() - started_s)
        self.all_reduce_s = median(seconds)

    def backends(self) -> dict[str, bool]:
        """Which of vLLM's all-reduces are in use."""
        communicator = parallel_state.get_tp_group().device_communicator
        names = ("ca_comm", "symm_mem_comm", "fi_ar_comm", "pynccl_comm")
        found = {name: getattr(communicator, name, None) for name in names}
        return {name: one is not None and not one.disabled for name, one in found.items()}

    def _add_up(self) -> None:
        if self._device.is_host_addressable:
            self._sum = self._summed()
            return
        if self._graph is None:
            self._graph, self._sum = self._captured(self._summed)
        self._graph.replay()
        self._wait()

    def _summed(self) -> torch.Tensor:
        assert self._weights is not None
        added: torch.Tensor = tensor_model_parallel_all_reduce(self._weights[:_NUM_SUMMED] * 1.0)
        return added

    def _captured(self, run: Any) -> tuple[Any, Any]:
        """A graph of a call, and the tensor that the graph writes."""
        run()  # libraries are loaded outside of captures
        self._wait()
        graph = torch.cuda.CUDAGraph()
        device = self._torch_device
        with graph_capture(device) as on, torch.cuda.graph(graph, stream=on.stream):
            result = run()
        return graph, result

    def _wait(self) -> None:
        if not self._device.is_host_addressable:
            torch.cuda.synchronize()

    @property
    def _torch_device(self) -> torch.device:
        if self._device.is_host_addressable:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())


def open_rank(
    rank: Rank, device_bytes: int, shared: mmap.mmap, *, is_emulated: bool
) -> tuple[Device, RankWork]:
    """Join the group and open the rank's device, as a worker does."""
    kind, reserve_bytes = ("emulated", 0) if is_emulated else ("cuda", _RESERVE_BYTES)
    may_spin = len(os.sched_getaffinity(0)) > rank.num_ranks
    join_group(rank.store, rank.rank, rank.num_ranks, may_spin=may_spin)
    keep_generators()
    device = open_device(kind, device_bytes, reserve_bytes, 0, rank.rank)
    return device, RankWork(rank, device, shared)


def follow(rank: Rank, device: Device, work: RankWork) -> NoReturn:
    """Carry out the leader's orders until the leader ends."""
    done = OrderCount()
    [links] = rank.links
    work.memory = memory = FollowerMemory(device, rank.rank, done)
    links.orders.send(device.num_pages)
    files = (links.files, (memory, memory.regions, work), done)
    threading.Thread(target=_until_lost, args=files, daemon=True).start()
    try:
        run_orders(links.orders, (memory, memory.regions, work), done)
    except RankLost:
        os._exit(0)
    raise AssertionError("orders have no end")


def _until_lost(*files: Any) -> None:
    try:
        run_files(*files)
    except RankLost:
        os._exit(0)
