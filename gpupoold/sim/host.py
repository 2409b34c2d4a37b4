"""Host memory of a simulated box: its size, and the model cache.

A model cache smaller than all models makes requests wait for a read from disk, as the daemon's
does.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpupoold.errors import UsageError

DISK_BYTES_PER_S = 5e9
"""Assumed rate of reading weights, less than the 7 GB/s of data sheets of NVMe SSDs on PCIe 4.0."""


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
    for its model; with None engines take nothing, and every device has all of them.
    ``engines_bytes`` is the limit for the engines of a GPU. The load of an engine takes ``load_s``
    seconds. ``prefix_cache_bytes`` limits the KV of ended requests on the whole box.
    """

    kv_host_bytes: int | None = None
    model_cache_bytes: int | None = None
    engine_bytes: int | None = None
    engines_bytes: int | None = None
    load_s: float | None = None
    prefix_cache_bytes: int | None = None
    own_engine_bytes: tuple[tuple[str, int], ...] = ()


NO_WISHES = HostWishes()


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

        Raises:
            UsageError: a model exceeds the cache.
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
