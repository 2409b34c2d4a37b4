"""What a process says of its memory."""

from __future__ import annotations

import gc
import mmap
import os

from benchmarks.in_worker.idle import process_memory

SMAPS = """\
55d0a0000000-55d0a0100000 r-xp 00000000 fe:00 123456    /usr/bin/python3.11
Size:               1024 kB
Rss:                 800 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me sd
55d0a1000000-55d0a1200000 rw-p 00000000 00:00 0         [heap]
Size:               2048 kB
Rss:                1900 kB
Anonymous:          1900 kB
7f0000000000-7f0000400000 rw-s 00000000 00:01 99        /memfd:gpupool-device (deleted)
Size:               4096 kB
Rss:                4096 kB
Anonymous:             0 kB
7f0001000000-7f0001400000 rw-s 00000000 00:01 100       /memfd:gpupool-kv (deleted)
Size:               4096 kB
Rss:                  64 kB
Anonymous:             0 kB
7f0002000000-7f0002001000 rw-p 00000000 00:00 0
Rss:                   4 kB
Anonymous:             4 kB
"""


def test_the_kernels_account_by_kind() -> None:
    assert process_memory(SMAPS.splitlines()) == {
        "anon_bytes": 1904 << 10,
        "shmem_bytes": 4096 << 10,
        "kv_host_touched_bytes": 64 << 10,
    }


def test_this_process_has_touched_what_it_wrote() -> None:
    gc.collect()  # mappings of earlier tests
    with open("/proc/self/smaps") as smaps:
        before = process_memory(smaps)
    fd = os.memfd_create("gpupool-kv", os.MFD_CLOEXEC)
    os.ftruncate(fd, 1 << 20)
    with mmap.mmap(fd, 1 << 20) as view:
        view[: 128 << 10] = bytes(128 << 10)
        with open("/proc/self/smaps") as smaps:
            memory = process_memory(smaps)
    os.close(fd)
    assert memory["kv_host_touched_bytes"] - before["kv_host_touched_bytes"] == 128 << 10
    assert memory["anon_bytes"] > 1 << 20
