"""A CUDA driver without a GPU: page tables, streams and limits in Python, strict about misuse.

Work given to a stream runs only when somebody waits for it, so code that forgets
to wait reads old bytes. Copies move real bytes between host addresses and the
bytearrays that stand for physical pages.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from gpupoold.memory.cuda_driver import CudaError

_FIRST_ADDRESS = 1 << 44  # far from anything the process maps
_MAX_REGISTRATION_BYTES = 64 << 30


@dataclass(slots=True)
class Work:
    """One copy or fill on a stream; touches device bytes ``start .. end``."""

    run: Callable[[], None]
    start: int
    end: int
    is_done: bool = False

    def finish(self) -> None:
        if not self.is_done:
            self.is_done = True
            self.run()


@dataclass(slots=True)
class Mapping:
    handle: int
    num_bytes: int
    is_accessible: bool = False


@dataclass(slots=True)
class Stream:
    work: list[Work] = field(default_factory=list)
    is_running_kernels: bool = False


class FakeCuda:
    """Implements ``CudaDriver`` on ``total_bytes`` of which ``taken_bytes`` are others'."""

    def __init__(self, total_bytes: int, taken_bytes: int = 0, granularity: int = 4096) -> None:
        self.total_bytes = total_bytes
        self.taken_bytes = taken_bytes
        self.calls: Counter[str] = Counter()
        self.log: list[tuple[str, int, int]] = []
        self.fail_at: dict[str, int] = {}  # call → which one of them fails, from 1
        self.is_open = False
        self.threads: set[int] = set()  # in which the context is current
        self._granularity = granularity
        self._memory: dict[int, bytearray] = {}
        self._mapped: dict[int, Mapping] = {}
        self._reserved: dict[int, int] = {}
        self._registered: dict[int, int] = {}
        self._streams: dict[int, Stream] = {0: Stream()}
        self._events: dict[int, list[Work]] = {}
        self._next = 1
        self._next_address = _FIRST_ADDRESS

    # What the tests look at

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.taken_bytes - sum(map(len, self._memory.values()))

    @property
    def leaks(self) -> dict[str, int]:
        """Things not given back."""
        kept = {
            "memory": len(self._memory),
            "mappings": len(self._mapped),
            "addresses": len(self._reserved),
            "registrations": len(self._registered),
            "streams": len(self._streams) - 1,
            "events": len(self._events),
            "contexts": int(self.is_open),
        }
        return {name: count for name, count in kept.items() if count}

    @property
    def registrations(self) -> dict[int, int]:
        return dict(self._registered)

    def launch(self, stream: int = 0) -> None:
        """Start kernels that end only when the stream is synchronised."""
        self._streams[stream].is_running_kernels = True

    def kernel_read(self, address: int, num_bytes: int, stream: int = 0) -> bytes:
        """What a kernel launched on ``stream`` now would read."""
        for work in self._streams[stream].work:
            work.finish()
        return self.read(address, num_bytes)

    def kernel_write(self, address: int, data: bytes, stream: int = 0) -> None:
        """A kernel that has written ``data`` once its stream is synchronised."""
        self.launch(stream)
        self._put(stream, partial(self._store, address, data), address, len(data))

    def read(self, address: int, num_bytes: int) -> bytes:
        """Device bytes as they are; an illegal address is an error."""
        found = bytearray()
        while len(found) < num_bytes:
            page, offset, memory = self._locate(address + len(found))
            found += memory[offset : offset + num_bytes - len(found)]
            assert self._mapped[page].is_accessible
        return bytes(found)

    # The driver

    def open(self, device_index: int) -> None:
        self._enter("open", device_index, 0)
        assert not self.is_open
        self.is_open = True
        self.threads = {threading.get_ident()}

    def bind_thread(self) -> None:
        self._enter("bind_thread", 0, 0)
        self.threads.add(threading.get_ident())

    def close(self) -> None:
        self._enter("close", 0, 0)
        self.is_open = False

    def memory_info(self) -> tuple[int, int]:
        return self.free_bytes, self.total_bytes

    def granularity(self) -> int:
        return self._granularity

    def create(self, num_bytes: int) -> int:
        self._enter("create", 0, num_bytes)
        self._require(num_bytes % self._granularity == 0, "create", "size")
        if num_bytes > self.free_bytes:
            raise CudaError("create", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        self._memory[handle := self._new()] = bytearray(b"\xee" * num_bytes)
        return handle

    def release(self, handle: int) -> None:
        self._enter("release", handle, 0)
        mapped = any(mapping.handle == handle for mapping in self._mapped.values())
        self._require(not mapped, "release", "memory is still mapped")
        del self._memory[handle]

    def reserve_addresses(self, num_bytes: int, alignment: int) -> int:
        self._enter("reserve_addresses", 0, num_bytes)
        start = -(-self._next_address // alignment) * alignment
        self._next_address = start + num_bytes + self._granularity  # a gap: overruns are seen
        self._reserved[start] = num_bytes
        return start

    def free_addresses(self, address: int, num_bytes: int) -> None:
        self._enter("free_addresses", address, num_bytes)
        self._require(self._reserved.get(address) == num_bytes, "free_addresses", "not reserved")
        inside = any(address <= page < address + num_bytes for page in self._mapped)
        self._require(not inside, "free_addresses", "still mapped")
        del self._reserved[address]

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._enter("map", address, num_bytes)
        reserved = any(
            start <= address and address + num_bytes <= start + length
            for start, length in self._reserved.items()
        )
        self._require(reserved, "map", "addresses are not reserved")
        self._require(address % self._granularity == 0, "map", "alignment")
        self._require(handle in self._memory, "map", "no such memory")
        self._require(len(self._memory[handle]) == num_bytes, "map", "part of a page")
        self._require(address not in self._mapped, "map", "mapped already")
        self._mapped[address] = Mapping(handle, num_bytes)

    def allow_access(self, address: int, num_bytes: int) -> None:
        self._enter("allow_access", address, num_bytes)
        for page in self._pages(address, num_bytes, "allow_access"):
            self._mapped[page].is_accessible = True

    def unmap(self, address: int, num_bytes: int) -> None:
        self._enter("unmap", address, num_bytes)
        busy = [number for number, s in self._streams.items() if s.is_running_kernels]
        self._require(not busy, "unmap", f"kernels are running on streams {busy}")
        for stream in self._streams.values():
            for work in stream.work:
                overlaps = work.start < address + num_bytes and address < work.end
                self._require(work.is_done or not overlaps, "unmap", "a copy is running there")
        for page in self._pages(address, num_bytes, "unmap"):
            del self._mapped[page]

    def copy_in(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._enter("copy_in", target, num_bytes)
        self._check_copy("copy_in", target, source, num_bytes)

        def run() -> None:
            self._store(target, ctypes.string_at(source, num_bytes))

        self._put(stream, run, target, num_bytes)

    def copy_out(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._enter("copy_out", source, num_bytes)
        self._check_copy("copy_out", source, target, num_bytes)

        def run() -> None:
            ctypes.memmove(target, self.read(source, num_bytes), num_bytes)

        self._put(stream, run, source, num_bytes)

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        self._enter("fill", address, num_bytes)
        self._check_device("fill", address, num_bytes)
        self._put(
            stream, partial(self._store, address, bytes([value]) * num_bytes), address, num_bytes
        )

    def create_stream(self) -> int:
        self._enter("create_stream", 0, 0)
        self._streams[stream := self._new()] = Stream()
        return stream

    def destroy_stream(self, stream: int) -> None:
        self.synchronize_stream(stream)
        del self._streams[stream]

    def synchronize_stream(self, stream: int) -> None:
        self._enter("synchronize_stream", stream, 0)
        for work in self._streams[stream].work:
            work.finish()
        self._streams[stream] = Stream()

    def create_event(self) -> int:
        self._enter("create_event", 0, 0)
        self._events[event := self._new()] = []
        return event

    def destroy_event(self, event: int) -> None:
        del self._events[event]

    def record_event(self, event: int, stream: int) -> None:
        self._enter("record_event", event, stream)
        self._events[event] = list(self._streams[stream].work)

    def wait_event(self, stream: int, event: int) -> None:
        self._enter("wait_event", stream, event)
        self._streams[stream].work += self._events[event]

    def register_host(self, address: int, num_bytes: int) -> None:
        self._enter("register_host", address, num_bytes)
        self._require(num_bytes <= _MAX_REGISTRATION_BYTES, "register_host", "too large")
        overlaps = any(
            start < address + num_bytes and address < start + length
            for start, length in self._registered.items()
        )
        self._require(not overlaps, "register_host", "registered already")
        self._registered[address] = num_bytes

    def unregister_host(self, address: int) -> None:
        self._enter("unregister_host", address, 0)
        self._require(address in self._registered, "unregister_host", "not registered")
        del self._registered[address]

    # Below

    def _enter(self, call: str, first: int, second: int) -> None:
        assert call == "open" or self.is_open, f"{call} without a context"
        bound = threading.get_ident() in self.threads or call in ("open", "bind_thread")
        assert bound, f"{call} from a thread in which the context is not current"
        self.calls[call] += 1
        self.log.append((call, first, second))
        if self.fail_at.get(call) == self.calls[call]:
            raise CudaError(call, "CUDA_ERROR_UNKNOWN", "asked to fail")

    def _require(self, condition: bool, call: str, problem: str) -> None:
        if not condition:
            raise AssertionError(f"{call}: {problem}")

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _pages(self, address: int, num_bytes: int, call: str) -> list[int]:
        """Starts of the mappings that make the range up exactly."""
        pages, at = [], address
        while at < address + num_bytes:
            self._require(at in self._mapped, call, f"{at:#x} is not mapped")
            pages.append(at)
            at += self._mapped[at].num_bytes
        self._require(at == address + num_bytes, call, "part of a mapping")
        return pages

    def _locate(self, address: int) -> tuple[int, int, bytearray]:
        for page, mapping in self._mapped.items():
            if page <= address < page + mapping.num_bytes:
                return page, address - page, self._memory[mapping.handle]
        raise AssertionError(f"illegal address {address:#x}")

    def _store(self, address: int, data: bytes) -> None:
        while data:
            _, offset, memory = self._locate(address)
            length = min(len(data), len(memory) - offset)
            memory[offset : offset + length] = data[:length]
            data, address = data[length:], address + length

    def _check_device(self, call: str, address: int, num_bytes: int) -> None:
        at = address
        while at < address + num_bytes:
            page, offset, memory = self._locate(at)
            self._require(self._mapped[page].is_accessible, call, f"no access to {at:#x}")
            at += len(memory) - offset

    def _check_copy(self, call: str, device: int, host: int, num_bytes: int) -> None:
        self._check_device(call, device, num_bytes)
        touched = [
            (start, length)
            for start, length in self._registered.items()
            if start < host + num_bytes and host < start + length
        ]
        whole = all(s <= host and host + num_bytes <= s + length for s, length in touched)
        self._require(whole, call, "the host range leaves its registration")

    def _put(self, stream: int, run: Callable[[], None], start: int, num_bytes: int) -> None:
        self._streams[stream].work.append(Work(run, start, start + num_bytes))
