"""Host memory by calls of the C library, shared memory with pages, and NUMA nodes.

Copies from the other socket may run at a third of the speed: the memory of a device's copies has a
policy that takes new pages from the device's node, whichever process or thread touches them first.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from mmap import PAGESIZE
from pathlib import Path

from gpupoold.system.kernel_memory import create_sealed_memfd, memory_room_bytes, read_text
from gpupoold.units import format_bytes

PROT_NONE = 0
PROT_READ = 1
PROT_READ_WRITE = 3
MAP_SHARED = 0x01
MAP_PRIVATE = 0x02
MAP_FIXED = 0x10
MAP_ANONYMOUS = 0x20
MAP_NORESERVE = 0x4000
MAP_POPULATE = 0x8000

MADV_HUGEPAGE = 14
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23

MPOL_DEFAULT, MPOL_PREFERRED = 0, 1

_MREMAP_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4
# Numbers of system calls without a C library function: (mbind, get_mempolicy).
_POLICY_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
_MPOL_F_NODE_OF_ADDRESS = 1 | 2
_NUM_SAMPLES = 16  # pages of which the nodes are asked
_MAX_NODES = 1024  # the kernel refuses a mask shorter than its possible nodes
_PY_BUF_WRITE = 0x200
_view_from = ctypes.pythonapi.PyMemoryView_FromMemory
_view_from.restype = ctypes.py_object
_view_from.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value

_MEMINFO = Path("/proc/meminfo")
_SHARED_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

NO_NODE = -1

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")
_NODE_TOTAL = re.compile(r"MemTotal:\s*(\d+) kB")
_logger = logging.getLogger(__name__)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, integer = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, integer, integer, integer, ctypes.c_long]
    libc.munmap.argtypes = [pointer, size]
    libc.mremap.restype = pointer
    libc.mremap.argtypes = [pointer, size, size, integer, pointer]
    libc.madvise.argtypes = [pointer, size, integer]
    libc.mincore.argtypes = [pointer, size, pointer]
    libc.syscall.restype = ctypes.c_long
    libc.memcpy.argtypes = [pointer, pointer, size]
    libc.memset.argtypes = [pointer, integer, size]
    return libc


def mmap(address: int | None, num_bytes: int, prot: int, flags: int, fd: int, offset: int) -> int:
    """Call ``mmap(2)`` without the GIL."""
    result: int | None = _libc().mmap(address, num_bytes, prot, flags, fd, offset)
    if result is None or result == _MAP_FAILED:
        raise _error(f"mmap of {num_bytes} bytes")
    return result


def munmap(address: int, num_bytes: int) -> None:
    if _libc().munmap(address, num_bytes) != 0:
        raise _error(f"munmap of {num_bytes} bytes")


def madvise(address: int, num_bytes: int, advice: int) -> None:
    """Call ``madvise(2)`` without the GIL."""
    if _libc().madvise(address, num_bytes, advice) != 0:
        raise _error(f"madvise of {num_bytes} bytes")


def populate(address: int, num_bytes: int) -> None:
    """Allocate and zero the missing pages of writable memory; ``EINVAL`` before kernel 5.14.

    The kernel is asked for huge pages, which it gives to shared memory only if the mode is
    ``advise`` or more (see ``systemd/gpupoold-nvidia.service``). For 1 GiB these take 44 ms, then
    1.7 ms to pin; pages of 4 KiB take 640 ms, then 43 ms (without the driver's part).
    """
    with suppress(OSError):  # a kernel without huge pages
        madvise(address, num_bytes, MADV_HUGEPAGE)
    madvise(address, num_bytes, MADV_POPULATE_WRITE)


def gets_huge_pages() -> bool:
    """Return whether ``populate`` may get huge pages for shared memory."""
    mode = read_text(_SHARED_HUGE_PAGES).partition("[")[2].partition("]")[0]
    return mode in ("advise", "within_size", "always", "force")


def move_pages(source: int, target: int, num_bytes: int) -> None:
    """Move the page-table entries of a shared mapping to ``target``, replacing its mapping.

    ``source`` stays a mapping of the same file, with no pages present.

    Raises OSError: with the errno of ``mremap(2)``; ``EINVAL`` before kernel 5.13.
    """
    flags = _MREMAP_MAYMOVE_FIXED_DONTUNMAP
    result: int | None = _libc().mremap(source, num_bytes, num_bytes, flags, target)
    if result != target:
        raise _error(f"mremap of {num_bytes} bytes")


def is_untouched(address: int, num_bytes: int) -> bool:
    """Return whether the whole pages inside private memory were never used; False without any."""
    start = -(-address // PAGESIZE) * PAGESIZE
    num_pages = (address + num_bytes - start) // PAGESIZE
    if num_pages <= 0:
        return False
    is_present = ctypes.create_string_buffer(num_pages)
    if _libc().mincore(start, num_pages * PAGESIZE, is_present) != 0:
        raise _error(f"mincore of {num_bytes} bytes")
    return not any(is_present.raw)


def memcpy(target: int, source: int, num_bytes: int) -> None:
    """Call ``memcpy(3)`` without the GIL."""
    _libc().memcpy(target, source, num_bytes)


def view(address: int, num_bytes: int) -> memoryview:
    """Return mapped memory as a writable view, which must not be used after the mapping's end."""
    mapped: memoryview = _view_from(address, num_bytes, _PY_BUF_WRITE)
    return mapped


def memset(target: int, value: int, num_bytes: int) -> None:
    """Call ``memset(3)`` without the GIL."""
    _libc().memset(target, value, num_bytes)


def mbind(address: int, num_bytes: int, mode: int, nodes: int) -> None:
    """Set the nodes, a bit mask, for new pages of mapped memory (``mbind(2)``).

    Raises OSError: with the errno of the call; ``ENOSYS`` on unknown processors.
    """
    mask = ctypes.create_string_buffer(nodes.to_bytes(_MAX_NODES // 8, "little"), _MAX_NODES // 8)
    size, last = ctypes.c_ulong(num_bytes), (ctypes.c_ulong(_MAX_NODES), ctypes.c_ulong(0))
    _policy_call(0, ctypes.c_void_p(address), size, ctypes.c_ulong(mode), mask, *last)


def _policy_call(which: int, *arguments: object) -> None:
    name, machine = ("mbind", "get_mempolicy")[which], platform.machine()
    if machine not in _POLICY_CALLS:
        raise OSError(errno.ENOSYS, f"{name}: no known system call number on {machine}")
    if _libc().syscall(_POLICY_CALLS[machine][which], *arguments) != 0:
        raise _error(name)


def most_used_node(address: int, num_bytes: int) -> int:
    """Return the NUMA node that has most pages of mapped memory, by a sample of the pages.

    Missing pages of the sample are allocated. ``NO_NODE`` where the call is forbidden, as in many
    containers; no call on a machine with one node.
    """
    if (count := num_nodes()) < 2:
        return 0 if count else NO_NODE
    node, flags = ctypes.c_int(), ctypes.c_ulong(_MPOL_F_NODE_OF_ADDRESS)
    nodes: Counter[int] = Counter()
    for number in range(_NUM_SAMPLES):
        at = ctypes.c_void_p(address + number * num_bytes // _NUM_SAMPLES)
        try:
            _policy_call(1, ctypes.byref(node), None, ctypes.c_ulong(0), at, flags)
        except OSError as error:
            _warn_once(str(error))
            return NO_NODE
        nodes[node.value] += 1
    return max(nodes, key=lambda node: nodes[node])


def nodes_of(fd: int, num_bytes: int, num_parts: int) -> tuple[int, ...]:
    """Return the NUMA node of each of equal parts of a memfd with all pages.

    The node is that of :func:`most_used_node`, and ``NO_NODE`` also without addresses for the
    memfd.
    """
    part_bytes = num_bytes // num_parts
    try:
        address = mmap(None, num_bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0)
    except OSError:
        return (NO_NODE,) * num_parts
    try:
        starts = (address + number * part_bytes for number in range(num_parts))
        return tuple(most_used_node(start, part_bytes) for start in starts)
    finally:
        munmap(address, num_bytes)


def _error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")


def create_memfd(
    name: str, num_bytes: int, populate: Callable[[int, int], None] | None = None
) -> int:
    """Return a descriptor of a new zeroed memfd with all pages; children do not inherit it.

    The size is sealed, so no mapping can lose pages. For ``populate`` see
    :func:`~gpupoold.system.kernel_memory.create_sealed_memfd`.

    Raises OSError: the machine or the control group has too little free memory.
    """
    check_available(name, num_bytes)
    return create_sealed_memfd(name, num_bytes, populate)


def check_available(name: str, num_bytes: int) -> None:
    """Check that so much memory is available.

    The kernel would allocate more pages too, until its OOM killer ends a process.

    Raises OSError: the machine or the control group has too little free memory.
    """
    free_bytes = available_bytes()
    if num_bytes > free_bytes:
        text = f"{name} needs {format_bytes(num_bytes)}, {format_bytes(free_bytes)} is available"
        raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}: {text}")


def available_bytes() -> int:
    """Return the memory available without swapping, by the kernel's estimate.

    A limit of the control group counts, as of a container or of ``MemoryMax=``.
    """
    fields = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    if "MemAvailable" not in fields:
        raise OSError(errno.ENOENT, f"no MemAvailable in {_MEMINFO}")
    free = int(fields["MemAvailable"].split()[0]) << 10
    room = memory_room_bytes()
    return free if room is None else min(free, room)


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


def prefer_node(address: int, num_bytes: int, node: int) -> None:
    """Take new pages of mapped memory from ``node`` while the node has free pages.

    The policy of shared memory holds for all processes. No effect for ``NO_NODE``, on a machine
    with one node, or where the call is forbidden, as in many containers: copies are then slower,
    never wrong.
    """
    if node == NO_NODE or num_nodes() < 2:
        return
    try:
        mbind(address, num_bytes, MPOL_PREFERRED, 1 << node)
    except OSError as error:
        _warn_once(str(error))


def prefer_nodes(fd: int, num_bytes: int, nodes: Sequence[int]) -> None:
    """Take new pages of the equal parts of a memfd from a node each, as :func:`prefer_node`."""
    part_bytes = num_bytes // len(nodes)
    for number, node in enumerate(nodes):
        if node != NO_NODE:
            flags, offset = MAP_SHARED | MAP_NORESERVE, number * part_bytes
            address = mmap(None, part_bytes, PROT_READ_WRITE, flags, fd, offset)
            prefer_node(address, part_bytes, node)
            munmap(address, part_bytes)


@functools.cache
def _warn_once(reason: str) -> None:
    _logger.warning("host memory cannot be kept near its GPU, so copies may be slow: %s", reason)
