"""Host memory near a device: copies from the other socket run at a third of the speed or less.

Memory for a device's copies is allocated inside ``with prefer_node(device.numa_node):``, on the
thread that allocates or first touches the memory.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpupoold.memory import libc

NO_NODE = -1

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")
_NODE_TOTAL = re.compile(r"MemTotal:\s*(\d+) kB")
_logger = logging.getLogger(__name__)


def node_of(pci_bus_id: str, root: Path = _PCI_DEVICES) -> int:
    """Return the NUMA node of a PCI device; ``NO_NODE`` if the kernel names none.

    ``pci_bus_id`` is ``domain:bus:device.function`` in hexadecimal, of any case and width.
    """
    domain, _, rest = pci_bus_id.lower().partition(":")
    try:
        return int((root / f"{int(domain, 16):04x}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return NO_NODE


def num_nodes(root: Path = _NODES) -> int:
    """Return the number of NUMA nodes of this machine, 0 if the kernel shows none."""
    return sum(1 for _ in root.glob("node[0-9]*"))


def node_bytes() -> dict[int, int]:
    """Return the memory of each NUMA node by its number."""
    found = {}
    for folder in _NODES.glob("node[0-9]*"):
        with suppress(OSError):
            match = _NODE_TOTAL.search((folder / "meminfo").read_text())
            if match is not None:
                found[int(folder.name.removeprefix("node"))] = int(match[1]) << 10
    return found


@contextmanager
def prefer_node(node: int) -> Iterator[None]:
    """Take new pages of the calling thread from ``node`` while the node has free pages.

    Includes pages of shared memory. No effect for ``NO_NODE``, on a machine with one node, or where
    the call is forbidden, as in many containers: copies are then slower, never wrong.
    """
    before: tuple[int, int] | None = None
    if node != NO_NODE and num_nodes() >= 2:
        with _warned_once():
            former = libc.get_mempolicy()
            libc.set_mempolicy(libc.MPOL_PREFERRED, 1 << node)
            before = former
    try:
        yield
    finally:
        if before is not None:
            with _warned_once():
                libc.set_mempolicy(*before)


@contextmanager
def _warned_once() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _warn_once(str(error))


@functools.cache
def _warn_once(reason: str) -> None:
    _logger.warning(
        "host memory cannot be allocated near its GPU, so copies may be slow: %s", reason
    )
