"""A CUDA driver without a GPU: page tables, streams and limits in Python, strict about misuse.

Work given to a stream runs only when somebody waits for it, so code that forgets
to wait reads old bytes. Copies move real bytes between host addresses and the
bytearrays that stand for physical pages. The copies of a batch run in reverse, which
the driver is free to do.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from gpupoold.memory.cuda.driver import CudaDriver, CudaError
from tests.unit.memory.fake_page_tables import PageTables, require

_MAX_REGISTRATION_BYTES = 64 << 30
_MAX_COPIES_PER_BATCH = 8192
_EVERYWHERE = 1 << 64
_PAGE_TABLE_CALLS = (
    *("create", "release", "reserve_addresses", "free_addresses"),
    *("map", "allow_access", "unmap"),
)


def no_effect() -> None:
    """Of a kernel whose reads and writes do not matter."""


@dataclass(slots=True)
class Work:
    """One copy, fill or kernel; touches device bytes ``start .. end`` and these of the host."""

    run: Callable[[], None]
    start: int
    end: int
    host: range = range(0)
    is_done: bool = False

    def finish(self) -> None:
        if not self.is_done:
            self.is_done = True
            self.run()


@dataclass(slots=True)
class Event:
    """``kind`` is that of the call that made it: stream or host."""

    kind: str
    work: list[Work] = field(default_factory=list)


class FakeCuda(CudaDriver):
    """A driver on ``total_bytes`` of which ``taken_bytes`` are others'."""

    def __init__(
        self,
        total_bytes: int,
        taken_bytes: int = 0,
        granularity: int = 4096,
        can_batch: bool = True,
    ) -> None:
        self.total_bytes = total_bytes
        self.taken_bytes = taken_bytes
        self.most_reserved_bytes = 1 << 60
        """The largest reservation of addresses, as of WSL's driver."""
        self.calls: Counter[str] = Counter()
        self.log: list[tuple[str, int, int]] = []
        self.fail_at: dict[str, int] = {}  # call → which one of them fails, from 1
        self.is_open = False
        self.threads: set[int] = set()  # in which the context is current
        self.capturing_thread: int | None = None
        self.batches: list[list[tuple[int, int, int]]] = []
        self._can_batch = can_batch
        self._ignoring_captures: set[int] = set()
        self._owner = 0
        self._lock = threading.RLock()
        self._tables = PageTables(granularity)
        self._registered: dict[int, int] = {}
        self._streams: dict[int, list[Work]] = {0: []}
        self._events: dict[int, Event] = {}
        self._next = 1

    # What the tests look at

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.taken_bytes - sum(map(len, self._tables.memory.values()))

    @property
    def leaks(self) -> dict[str, int]:
        """Things not given back."""
        kept = {
            "memory": len(self._tables.memory),
            "mappings": len(self._tables.mapped),
            "addresses": len(self._tables.reserved),
            "registrations": len(self._registered),
            "streams": len(self._streams) - 1,
            "events": len(self._events),
            "contexts": int(self.is_open),
        }
        return {name: count for name, count in kept.items() if count}

    @property
    def registrations(self) -> dict[int, int]:
        return dict(self._registered)

    @property
    def num_events(self) -> int:
        return len(self._events)

    @property
    def busy_streams(self) -> list[int]:
        """Streams with work that has not been done."""
        return [n for n, works in self._streams.items() if not all(w.is_done for w in works)]

    def launch(self, stream: int = 0, start: int = 0, end: int = _EVERYWHERE) -> None:
        """Start a kernel, on whatever addresses or these, that ends only when it is waited for."""
        with self._lock:
            self._streams[stream].append(Work(no_effect, start, end))

    def kernel_read(self, address: int, num_bytes: int, stream: int = 0) -> bytes:
        """What a kernel launched on ``stream`` now would read."""
        with self._lock:
            self._finish(self._streams[stream])
            return self.read(address, num_bytes)

    def kernel_write(self, address: int, data: bytes, stream: int = 0) -> None:
        """A kernel that has written ``data`` once its stream is waited for."""
        write = partial(self._tables.write, address, data)
        with self._lock:
            self._streams[stream].append(Work(write, 0, _EVERYWHERE))

    def read(self, address: int, num_bytes: int) -> bytes:
        """Device bytes as they are; an illegal address is an error."""
        return self._tables.read(address, num_bytes)

    # The driver

    def open(self, device_index: int) -> None:
        assert not self.is_open
        self._owner = threading.get_ident()
        self.is_open, self.threads = True, {self._owner}
        with self._called("open", device_index):
            pass

    def bind_thread(self) -> None:
        self.threads.add(threading.get_ident())
        self._ignoring_captures.add(threading.get_ident())
        with self._called("bind_thread"):
            pass

    def close(self) -> None:
        with self._called("close"):
            self.is_open = False

    def pci_bus_id(self) -> str:
        return "0000:FF:1F.0"

    def memory_info(self) -> tuple[int, int]:
        return self.free_bytes, self.total_bytes

    def granularity(self) -> int:
        return self._tables.granularity

    def create(self, num_bytes: int) -> int:
        with self._called("create", 0, num_bytes):
            if num_bytes > self.free_bytes:
                raise CudaError("create", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
            self._tables.create(handle := self._new(), num_bytes)
            return handle

    def release(self, handle: int) -> None:
        with self._called("release", handle):
            self._tables.release(handle)

    def reserve_addresses(self, num_bytes: int, alignment: int) -> int:
        with self._called("reserve_addresses", 0, num_bytes):
            if num_bytes > self.most_reserved_bytes:
                raise CudaError("reserve", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
            return self._tables.reserve(num_bytes, alignment)

    def free_addresses(self, address: int, num_bytes: int) -> None:
        with self._called("free_addresses", address, num_bytes):
            self._tables.free(address, num_bytes)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        with self._called("map", address, num_bytes):
            self._tables.map(address, num_bytes, handle)

    def allow_access(self, address: int, num_bytes: int) -> None:
        with self._called("allow_access", address, num_bytes):
            self._tables.allow_access(address, num_bytes)

    def unmap(self, address: int, num_bytes: int) -> None:
        with self._called("unmap", address, num_bytes):
            for work in self._undone():
                overlaps = work.start < address + num_bytes and address < work.end
                require(not overlaps, "unmap", "a kernel or copy is running there")
            self._tables.unmap(address, num_bytes)

    def copy_in(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        with self._called("copy_in", target, num_bytes):
            self._copy("copy_in", target, source, num_bytes, stream)

    def copy_out(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        with self._called("copy_out", source, num_bytes):
            self._copy("copy_out", target, source, num_bytes, stream)

    def can_copy_batches(self) -> bool:
        return self._can_batch

    def copy_batch(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        with self._called("copy_batch", len(copies), stream):
            require(self._can_batch, "copy_batch", "this driver has no such call")
            require(stream != 0, "copy_batch", "the legacy default stream")
            require(0 < len(copies) <= _MAX_COPIES_PER_BATCH, "copy_batch", "number of copies")
            targets = sorted((target, target + num_bytes) for target, _, num_bytes in copies)
            apart = all(a[1] <= b[0] for a, b in itertools.pairwise(targets))
            require(apart, "copy_batch", "the order of its copies matters")
            self.batches.append([*copies])
            for target, source, num_bytes in reversed(copies):
                self._copy("copy_batch", target, source, num_bytes, stream)

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        with self._called("fill", address, num_bytes):
            require(num_bytes > 0, "fill", "no bytes")
            self._tables.check("fill", address, num_bytes)
            write = partial(self._tables.write, address, bytes([value]) * num_bytes)
            self._streams[stream].append(Work(write, address, address + num_bytes))

    def create_stream(self) -> int:
        with self._called("create_stream"):
            self._streams[stream := self._new()] = []
            return stream

    def destroy_stream(self, stream: int) -> None:
        with self._called("destroy_stream", stream):
            require(stream not in self.busy_streams, "destroy_stream", "it has work left")
            del self._streams[stream]

    def synchronize_stream(self, stream: int) -> None:
        with self._called("synchronize_stream", stream):
            self._finish(self._streams[stream])
            self._streams[stream] = []

    def create_event(self) -> int:
        return self._create_event("stream")

    def create_host_event(self) -> int:
        return self._create_event("host")

    def destroy_event(self, event: int) -> None:
        with self._called("destroy_event", event):
            del self._events[event]

    def record_event(self, event: int, stream: int) -> None:
        with self._called("record_event", event, stream):
            # What is done need not be waited for, and streams nobody synchronises stay short.
            self._streams[stream] = [w for w in self._streams[stream] if not w.is_done]
            self._events[event].work = [*self._streams[stream]]

    def synchronize_event(self, event: int) -> None:
        with self._called("synchronize_event", event):
            require(self._events[event].kind == "host", "synchronize_event", "would spin")
            self._finish(self._events[event].work)

    def wait_event(self, stream: int, event: int) -> None:
        with self._called("wait_event", stream, event):
            self._streams[stream] += self._events[event].work

    def register_host(self, address: int, num_bytes: int) -> None:
        with self._called("register_host", address, num_bytes):
            require(num_bytes <= _MAX_REGISTRATION_BYTES, "register_host", "too large")
            require(not self._touched(address, num_bytes), "register_host", "registered already")
            self._registered[address] = num_bytes

    def unregister_host(self, address: int) -> None:
        with self._called("unregister_host", address):
            require(address in self._registered, "unregister_host", "not registered")
            end = address + self._registered[address]
            for work in self._undone():
                overlaps = work.host.start < end and address < work.host.stop
                require(not overlaps, "unregister_host", "a copy is running there")
            del self._registered[address]

    # Below

    @contextmanager
    def _called(self, call: str, first: int = 0, second: int = 0) -> Iterator[None]:
        with self._lock:
            thread = threading.get_ident()
            require(self.is_open, call, "no context")
            require(thread in self.threads, call, "the context is not current in this thread")
            if call in _PAGE_TABLE_CALLS:
                require(thread == self._owner, call, "page tables are one thread's")
            if self.capturing_thread not in (None, thread):
                ignores = thread in self._ignoring_captures
                require(ignores, call, "another thread's graph capture is broken")
            self.calls[call] += 1
            self.log.append((call, first, second))
            if self.fail_at.get(call) == self.calls[call]:
                raise CudaError(call, "CUDA_ERROR_UNKNOWN", "asked to fail")
            yield

    def _copy(self, call: str, target: int, source: int, num_bytes: int, stream: int) -> None:
        require(num_bytes > 0, call, "no bytes")
        is_in = target in self._tables
        device, host = (target, source) if is_in else (source, target)
        self._tables.check(call, device, num_bytes)
        require(is_in or call != "copy_in", call, "the other way round")
        require(not is_in or call != "copy_out", call, "the other way round")
        whole = all(
            start <= host and host + num_bytes <= start + length
            for start, length in self._touched(host, num_bytes)
        )
        require(whole, call, "the host range leaves its registration")

        def copy_in() -> None:
            self._tables.write(device, ctypes.string_at(host, num_bytes))

        def copy_out() -> None:
            ctypes.memmove(host, self._tables.read(device, num_bytes), num_bytes)

        run = copy_in if is_in else copy_out
        used = range(host, host + num_bytes)
        self._streams[stream].append(Work(run, device, device + num_bytes, used))

    def _touched(self, address: int, num_bytes: int) -> list[tuple[int, int]]:
        """Registrations that a host range touches."""
        return [
            (start, length)
            for start, length in self._registered.items()
            if start < address + num_bytes and address < start + length
        ]

    def _create_event(self, kind: str) -> int:
        with self._called("create_event"):
            self._events[event := self._new()] = Event(kind)
            return event

    def _undone(self) -> Iterator[Work]:
        return (work for works in self._streams.values() for work in works if not work.is_done)

    def _finish(self, works: list[Work]) -> None:
        for work in works:
            work.finish()

    def _new(self) -> int:
        self._next += 1
        return self._next
