"""Host memory of a simulated box: its size, and the model cache.

A model cache smaller than all models makes requests wait for a read from disk, as the daemon's
does.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from gpupoold.config.budgets import Wishes, default_engines_bytes, work_out
from gpupoold.config.machine import Machine, MachineDevice
from gpupoold.errors import SettingError, UsageError
from gpupoold.latency.shape import hardware
from gpupoold.sim.boxes import Box
from gpupoold.sim.hosting import EngineCosts

DISK_BYTES_PER_S = 5e9
"""Assumed rate of reading weights, less than the 7 GB/s of data sheets of NVMe SSDs on PCIe 4.0."""

_GIB = 1 << 30
# Aegaeon's nodes have 2 TB for eight H800 (section 7.1 of the paper).
_LARGE_GPU_BYTES, _HOST_BYTES_PER_LARGE_GPU = 70 * 10**9, 256 * _GIB
# The largest cloud instance with eight A10G (AWS g5.48xlarge) has 768 GiB.
_HOST_BYTES_PER_SMALL_GPU = 96 * _GIB
LIBRARIES_BYTES = 1_120_000_000
"""Memory of libraries and kernels, which the first engine of a GPU loads for all: the first one
measured on an H200 took 1.2 GiB.
"""
ENGINE_BYTES = 172_000_000
"""Memory of an engine outside the pages: ten of FP8 8B models took 2.84 GB on an H200, with
libraries.
"""
LOAD_S = 13.0
"""Measured per further FP8 model of 9 GB on an H200, compiled kernels (docs/internals/gpu.md)."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Budgets in bytes; ``kv_bytes_per_gpu`` is the KV host cache of each GPU."""

    kv_bytes_per_gpu: int
    model_cache_bytes: int
    disk_bytes_per_s: float = DISK_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class HostWishes:
    """Budgets in bytes as in the daemon's configuration; None has the daemon's default.

    An engine takes ``engine_bytes`` outside the pages of each GPU, or what ``own_engine_bytes`` has
    for its model; with 0 engines take nothing, and every device has all of them.
    ``engines_bytes`` is the limit for the engines of a GPU, with libraries. The load of an engine
    takes ``load_s`` seconds. ``prefix_cache_bytes`` limits the KV of ended requests of the box.
    ``far_share`` of the rate is left to copies between two NUMA nodes, None for one node.
    """

    kv_host_bytes: int | None = None
    model_cache_bytes: int | None = None
    engine_bytes: int | None = None
    engines_bytes: int | None = None
    load_s: float | None = None
    prefix_cache_bytes: int | None = None
    own_engine_bytes: tuple[tuple[str, int], ...] = ()
    far_share: float | None = None

    def over(self, others: HostWishes) -> HostWishes:
        """Return the wishes, with those of ``others`` in place of defaults."""
        wished = {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) not in (None, ())
        }
        return replace(others, **wished)


NO_WISHES, FREE_ENGINES = HostWishes(), HostWishes(engine_bytes=0)


class ModelCache:
    """Weights snapshots in host memory, least recently used models evicted first.

    Models with live requests stay. One model at a time is read from disk, in the order of the first
    requests; a model waits until idle models leave enough memory. ``on_evict`` is called for each
    evicted model.
    """

    def __init__(
        self, host: HostMemory, weight_bytes: Mapping[str, int], on_evict: Callable[[str], None]
    ) -> None:
        """Read as many models as fit, in the order of ``weight_bytes``.

        Raises UsageError if a model exceeds the cache.
        """
        self._host = host
        self._weight_bytes = weight_bytes
        self._on_evict = on_evict
        self._cached: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._used_bytes = 0
        self._num_live: Counter[str] = Counter()
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._reading: str | None = None
        self.num_reads = 0
        for name, num_bytes in weight_bytes.items():
            if num_bytes > host.model_cache_bytes:
                raise UsageError(
                    f"{name} weighs {num_bytes / 1e9:.3g} GB, the model cache has "
                    f"{host.model_cache_bytes / 1e9:.3g} GB",
                    "raise --model-cache",
                )
            if self._used_bytes + num_bytes <= host.model_cache_bytes:
                self._cached[name] = None
                self._used_bytes += num_bytes

    def arrived(self, model: str) -> bool:
        """Count a live request; return whether the model is in host memory."""
        self._num_live[model] += 1
        if model in self._cached:
            self._cached.move_to_end(model)
            return True
        if model != self._reading:
            self._waiting.setdefault(model)
        return False

    def ended(self, model: str) -> None:
        """Count the end of a request."""
        self._num_live[model] -= 1

    def next_read(self) -> tuple[str, float] | None:
        """Begin the next read, if the disk is free and memory is; return the model and seconds."""
        if self._reading is not None or not self._waiting:
            return None
        model = next(iter(self._waiting))
        num_bytes = self._weight_bytes[model]
        if not self._free(num_bytes):
            return None
        del self._waiting[model]
        self._reading = model
        self._used_bytes += num_bytes
        self.num_reads += 1
        return model, num_bytes / self._host.disk_bytes_per_s

    def was_read(self) -> None:
        """End the read under way."""
        assert self._reading is not None
        self._cached[self._reading] = None
        self._reading = None

    def _free(self, num_bytes: int) -> bool:
        """Evict idle models until ``num_bytes`` fit; without enough of them evict none."""
        short = self._used_bytes + num_bytes - self._host.model_cache_bytes
        victims: list[str] = []
        for name in self._cached:
            if short <= 0:
                break
            if not self._num_live[name]:
                victims.append(name)
                short -= self._weight_bytes[name]
        if short > 0:
            return False
        for name in victims:
            del self._cached[name]
            self._used_bytes -= self._weight_bytes[name]
            self._on_evict(name)
        return True


def host_bytes(box: Box) -> int:
    """Return the host memory that a box of these GPUs is assumed to have.

    A box is one host, as a daemon has.
    """
    is_large = hardware(box.gpu).memory_bytes >= _LARGE_GPU_BYTES
    per_gpu = _HOST_BYTES_PER_LARGE_GPU if is_large else _HOST_BYTES_PER_SMALL_GPU
    return per_gpu * sum(box.groups)


def host_memory(box: Box, wishes: HostWishes = NO_WISHES) -> HostMemory:
    """Return the budgets of a box, worked out as by the daemon unless wished.

    Raises UsageError if the wish leaves too little of the assumed host memory.
    """
    kv_bytes, cache_bytes = wishes.kv_host_bytes, wishes.model_cache_bytes
    if kv_bytes is None or cache_bytes is None:
        try:
            budgets = work_out(Wishes(cache_bytes, kv_bytes), _machine(box))
        except SettingError as error:
            raise UsageError(str(error), "give both --kv-host and --model-cache") from error
        kv_bytes, cache_bytes = budgets.kv_host_bytes, budgets.model_cache_bytes
    return HostMemory(kv_bytes, cache_bytes)


def engine_costs(box: Box, wishes: HostWishes = NO_WISHES) -> EngineCosts | None:
    """Return the costs of the engines of a box; None if engines take no memory.

    The limit is the daemon's default unless wished, less the libraries. Groups need no other
    figures: an engine takes the memory on each of their GPUs. Raises UsageError if the wishes have
    a limit or a time of loads, but engines take no memory.
    """
    num_bytes = ENGINE_BYTES if wishes.engine_bytes is None else wishes.engine_bytes
    if not (num_bytes or wishes.own_engine_bytes):
        if wishes.engines_bytes is None and wishes.load_s is None:
            return None
        raise UsageError("engines take no memory here", "add --engine-memory, such as 172MB")
    limit_bytes = wishes.engines_bytes
    if limit_bytes is None:
        limit_bytes = default_engines_bytes(work_out(Wishes(), _machine(box)))
    load_s = LOAD_S if wishes.load_s is None else wishes.load_s
    left_bytes = max(0, limit_bytes - LIBRARIES_BYTES)
    return EngineCosts(num_bytes, left_bytes, load_s, wishes.own_engine_bytes)


def _machine(box: Box) -> Machine:
    gpu = MachineDevice("cuda", hardware(box.gpu).memory_bytes)
    return Machine(host_bytes(box), (gpu,) * sum(box.groups))
