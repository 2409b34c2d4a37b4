"""Emptying a device for measurements, and memory left on an empty device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpupoold.errors import Refused
from gpupoold.worker.threads import HEAP

if TYPE_CHECKING:
    from gpupoold.worker.engine.engine import ModelEngine
    from gpupoold.worker.turns.loop import TurnLoop

_KV_HOST_CACHE = "/memfd:gpupool-kv "
_POLL_S = 0.01
_SHARED = ("/memfd:", "/dev/shm/", "/dev/zero")


def empty_device(loop: TurnLoop) -> None:
    """Page all models out of an idle device, whose host memory is then pinned.

    Raises:
        Refused: the device serves requests.
    """
    if not loop.ledger.is_idle():
        raise Refused("the device is serving requests", "run the benchmark on an idle daemon")
    loop.interrupt_turn()
    HEAP.collect()
    for name in loop.engines:
        loop.residency.page_out(name)
    device = loop.own.device
    while (unpinned := device.unpinned()).num_bytes and not unpinned.problem:
        time.sleep(_POLL_S)


@contextlib.contextmanager
def crowded(loop: TurnLoop, incoming: ModelEngine) -> Iterator[None]:
    """Hold back free pages inside the context, so that a switch to ``incoming`` must evict.

    The other models' pages are then as many as the switch needs, or more.
    """
    pool, weights, kv = loop.residency.pool, incoming.weights, incoming.kv
    first = kv.geometry.extent_pages  # with the null block
    wanted = weights.num_missing_pages + kv.num_returning_pages + first
    held = sum(one.weights.num_mapped_pages for one in loop.engines.values())
    kv_bytes = sum(one.kv.resident_bytes for one in loop.engines.values())
    held += kv_bytes // loop.own.device.page_bytes
    runs = pool.allocate(max(0, pool.num_free - max(0, wanted - held)))
    try:
        yield
    finally:
        pool.free(runs)


def leftovers(loop: TurnLoop) -> dict[str, Any]:
    """Return the memory in use without live requests and without models on the device.

    Pages that are not free, and bytes in use of the KV host cache, are leaks. ``anon_bytes`` and
    ``shmem_bytes`` are this process's private and shared memory by the kernel's count, without the
    KV host cache, which takes memory gradually within its budget and keeps it
    (``kv_host_touched_bytes``). ``device_free_bytes`` is the driver's free memory beside the pages,
    None on a device without a driver.

    Raises:
        Refused: the device serves requests.
    """
    empty_device(loop)
    loop.residency.check_integrity()
    pool = loop.residency.pool
    with Path("/proc/self/smaps").open() as smaps:
        memory = process_memory(smaps)
    return {
        "pages": pool.num_pages,
        "free_pages": pool.num_free,
        "page_bytes": loop.own.device.page_bytes,
        "kv_host_bytes": loop.own.host.used_bytes - loop.own.host.prefix_bytes,
        "device_free_bytes": loop.own.device.free_bytes(),
        **memory,
    }


def process_memory(smaps: Iterable[str]) -> dict[str, int]:
    """Return resident bytes by kind from the lines of ``/proc/PID/smaps``."""
    totals = dict.fromkeys(("anon_bytes", "shmem_bytes", "kv_host_touched_bytes"), 0)
    kind = ""
    for line in smaps:
        name, *values = line.split()
        if not name.endswith(":"):
            kind = _kind(values)
        elif name == "Anonymous:":
            totals["anon_bytes"] += int(values[0]) << 10
        elif name == "Rss:" and kind:
            totals[kind] += int(values[0]) << 10
    return totals


def _kind(headline: list[str]) -> str:
    """Return the kind of a mapping by its permissions, offset, device, inode and path."""
    path = " ".join(headline[4:])
    if path.startswith(_KV_HOST_CACHE):
        return "kv_host_touched_bytes"
    return "shmem_bytes" if path.startswith(_SHARED) else ""
