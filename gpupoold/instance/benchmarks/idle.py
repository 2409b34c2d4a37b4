"""An empty device to measure on, and what is still held when it should be empty."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpupoold.errors import Refused

if TYPE_CHECKING:
    from gpupoold.instance.turn_loop import TurnLoop

_MEMORY_FIELDS = {"RssAnon": "anon_bytes", "RssShmem": "shmem_bytes"}


def empty_device(loop: TurnLoop) -> None:
    """Take all models off a device that serves nobody.

    Raises:
        Refused: it serves requests.
    """
    if not loop.ledger.is_idle():
        raise Refused("the device is serving requests", "run the benchmark on an idle daemon")
    loop.interrupt_turn()
    for name in loop.engines:
        loop.residency.page_out(name)


def leftovers(loop: TurnLoop) -> dict[str, Any]:
    """What is held when no request is live and no model is on the device.

    Pages that are not free then, and bytes in the KV host cache, are lost for good.
    ``anon_bytes`` and ``shmem_bytes`` are this process's memory, as the kernel counts it.

    Raises:
        Refused: the device serves requests.
    """
    empty_device(loop)
    loop.residency.check_integrity()
    pool = loop.residency.pool
    return {
        "pages": pool.num_pages,
        "free_pages": pool.num_free,
        "page_bytes": loop.device.page_bytes,
        "kv_host_bytes": loop.host.used_bytes,
        "kv_host_reserved_bytes": loop.host.reserved_bytes,
    } | _process_memory(Path("/proc/self/status").read_text())


def _process_memory(status: str) -> dict[str, int]:
    """The lines of ``/proc/PID/status`` that say what memory is there, in bytes."""
    rows = (line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        _MEMORY_FIELDS[name]: int(value.split()[0]) * 1024
        for name, value in rows
        if name in _MEMORY_FIELDS
    }
