"""The fake card's driver, compiled here and asked by ctypes: it refuses what CUDA refuses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fake_card.build import DRIVER_SOURCES, compile_sources, link

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

PAGE = 2 << 20
CARD_BYTES = 1 << 30
CONTEXT_BYTES = 500 << 20
INVALID, NO_MEMORY, NOT_INITIALIZED, NO_CONTEXT = 1, 2, 3, 201
REGISTERED, NOT_REGISTERED = 712, 713
UNSUPPORTED, LOST, UNJOINED, ISOLATION, CAPTURED = 900, 901, 904, 905, 907
GLOBAL, THREAD_LOCAL = 0, 1
NON_BLOCKING, NO_TIMING_INTERPROCESS = 1, 6
READ_WRITE = 3

u64 = ctypes.c_uint64


class Refused(Exception):
    """A call's code other than 0."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Card:
    """The driver's calls: numbers in, the number that a call leaves in its first argument out."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._allocation = (ctypes.c_int * 8)(1, 0, 1, 0)  # device memory, on device 0
        self._access = (ctypes.c_int * 3)(1, 0, READ_WRITE)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises ``Refused``."""
        told = [u64(one) if isinstance(one, int) else one for one in arguments]
        if code := getattr(self._library, name)(*told):
            raise Refused(code)

    def made(self, name: str, *arguments: Any) -> int:
        """What a call makes."""
        made = u64()
        self.call(name, ctypes.byref(made), *arguments)
        return made.value

    def begin(self) -> None:
        """Have a context in this thread."""
        self.call("cuInit", 0)
        self.call("cuCtxSetCurrent", self.made("cuDevicePrimaryCtxRetain", 0))

    def create(self, size: int = PAGE) -> int:
        return self.made("cuMemCreate", size, self._allocation, 0)

    def reserve(self, size: int) -> int:
        return self.made("cuMemAddressReserve", size, 0, 0, 0)

    def map(self, address: int, handle: int, size: int = PAGE) -> None:
        self.call("cuMemMap", address, size, 0, handle, 0)

    def allow(self, address: int, size: int = PAGE) -> None:
        self.call("cuMemSetAccess", address, size, self._access, 1)

    def unmap(self, address: int, size: int = PAGE) -> None:
        self.call("cuMemUnmap", address, size)

    def free_bytes(self) -> int:
        total = u64()
        free = self.made("cuMemGetInfo_v2", ctypes.byref(total))
        assert total.value == CARD_BYTES
        return free

    def stream(self) -> int:
        return self.made("cuStreamCreate", NON_BLOCKING)

    def event(self, flags: int = 2) -> int:
        return self.made("cuEventCreate", flags)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fake-card")
    objects = compile_sources(folder, DRIVER_SOURCES, options=["-Werror"])
    link(folder / "libcuda.so.1", objects)
    return folder / "libcuda.so.1"


@pytest.fixture(scope="module")
def one_card(library: Path) -> Card:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_CARD_BYTES", str(CARD_BYTES))
        card = Card(library)
        card.begin()
    return card


@pytest.fixture
def card(one_card: Card) -> Iterator[Card]:
    """All that a test takes it gives back."""
    before = one_card.free_bytes()
    yield one_card
    assert one_card.free_bytes() == before


@pytest.fixture
def mapped(card: Card) -> Iterator[int]:
    """Three pages side by side, of which the first two are mapped."""
    address = card.reserve(3 * PAGE)
    for at in (address, address + PAGE):
        handle = card.create()
        card.map(at, handle)
        card.call("cuMemRelease", handle)
    card.allow(address, 2 * PAGE)
    yield address
    card.unmap(address, 2 * PAGE)
    card.call("cuMemAddressFree", address, 3 * PAGE)


class TestMemory:
    def test_a_page_is_the_same_behind_every_address(self, card: Card) -> None:
        address, handle = card.reserve(2 * PAGE), card.create()
        for at in (address, address + PAGE):
            card.map(at, handle)
        card.allow(address, 2 * PAGE)
        source, target = ctypes.create_string_buffer(b"bytes"), ctypes.create_string_buffer(6)
        card.call("cuMemcpyHtoDAsync_v2", address + 7, source, 6, 0)
        card.call("cuMemcpyDtoHAsync_v2", target, address + PAGE + 7, 6, 0)
        assert target.value == b"bytes"
        card.unmap(address, 2 * PAGE)
        card.call("cuMemAddressFree", address, 2 * PAGE)
        card.call("cuMemRelease", handle)

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda card, at: card.create(PAGE + 4096),
            lambda card, at: card.reserve(PAGE // 2),
            lambda card, at: card.map(at + 2 * PAGE, 12345),
            lambda card, at: card.allow(at + PAGE, 2 * PAGE),
            lambda card, at: card.unmap(at + PAGE, 2 * PAGE),
            lambda card, at: card.unmap(at + PAGE // 2),
            lambda card, at: card.call("cuMemAddressFree", at, 3 * PAGE),
            lambda card, at: card.call("cuMemAddressFree", at + 3 * PAGE, PAGE),
            lambda card, at: card.call("cuMemRelease", 4096),
            lambda card, at: card.call("cuMemFree_v2", at),
            lambda card, at: card.call("cuMemsetD8Async", at + PAGE, 0, PAGE + 1, 0),
            lambda card, at: card.call("cuMemsetD8Async", at - 1, 0, 2, 0),
        ],
    )
    def test_wrong_calls_are_refused(self, card: Card, mapped: int, wrong: Any) -> None:
        with pytest.raises(Refused) as caught:
            wrong(card, mapped)
        assert caught.value.code == INVALID

    def test_a_mapping_is_made_once_and_used_after_it_was_allowed(self, card: Card) -> None:
        address, handle = card.reserve(PAGE), card.create()
        card.map(address, handle)
        with pytest.raises(Refused) as again:
            card.map(address, handle)
        with pytest.raises(Refused) as early:
            card.call("cuMemsetD8Async", address, 0, 1, 0)
        assert (again.value.code, early.value.code) == (INVALID, INVALID)
        card.call("cuMemRelease", handle)
        card.unmap(address)
        card.call("cuMemAddressFree", address, PAGE)

    def test_memory_is_counted_until_it_is_mapped_nowhere(self, card: Card, mapped: int) -> None:
        before = card.free_bytes()
        assert before == CARD_BYTES - CONTEXT_BYTES - 2 * PAGE
        handle = card.create(8 * PAGE)
        assert card.free_bytes() == before - 8 * PAGE
        card.map(mapped + 2 * PAGE, handle)
        card.call("cuMemRelease", handle)
        assert card.free_bytes() == before - 8 * PAGE
        card.unmap(mapped + 2 * PAGE)
        assert card.free_bytes() == before

    def test_there_is_no_more_than_the_card_has(self, card: Card) -> None:
        for take in (card.create, lambda size: card.made("cuMemAlloc_v2", size)):
            with pytest.raises(Refused) as caught:
                take(CARD_BYTES)
            assert caught.value.code == NO_MEMORY

    def test_host_memory_is_registered_once_and_copied_within_one_piece(
        self, card: Card, mapped: int
    ) -> None:
        buffer = ctypes.create_string_buffer(8192)
        at = ctypes.addressof(buffer)
        for half in (at, at + 4096):
            card.call("cuMemHostRegister_v2", half, 4096, 0)
        with pytest.raises(Refused) as caught:
            card.call("cuMemHostRegister_v2", at + 4000, 8, 0)
        assert caught.value.code == REGISTERED
        card.call("cuMemcpyHtoDAsync_v2", mapped, at + 4096, 4096, 0)
        with pytest.raises(Refused) as caught:
            card.call("cuMemcpyHtoDAsync_v2", mapped, at + 4000, 4096, 0)
        assert caught.value.code == INVALID
        for half in (at, at + 4096):
            card.call("cuMemHostUnregister", half)
        with pytest.raises(Refused) as caught:
            card.call("cuMemHostUnregister", at)
        assert caught.value.code == NOT_REGISTERED


_TAKER = """
import ctypes, os, sys
card, made, total = ctypes.CDLL(sys.argv[1]), ctypes.c_uint64(), ctypes.c_uint64()
card.cuInit(0)
card.cuDevicePrimaryCtxRetain(ctypes.byref(made), 0)
card.cuCtxSetCurrent(made)
child = os.fork()
if child == 0:
    os._exit(card.cuCtxSynchronize())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
card.cuMemGetInfo_v2(ctypes.byref(made), ctypes.byref(total))
print(made.value, flush=True)
sys.stdin.read()
"""


def test_processes_share_a_card_as_long_as_they_live(library: Path, tmp_path: Path) -> None:
    """And a forked child has none."""
    (tmp_path / "state").write_bytes(bytes(4096))
    told = {"FAKE_CARD_STATE": str(tmp_path / "state"), "FAKE_CARD_BYTES": str(CARD_BYTES)}

    @contextlib.contextmanager
    def taker() -> Iterator[int]:
        command = [sys.executable, "-c", _TAKER, str(library)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=os.environ | told, stdin=pipe, stdout=pipe) as process:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == NOT_INITIALIZED
            yield int(process.stdout.readline())
            process.kill()

    with taker() as alone:
        assert alone == CARD_BYTES - CONTEXT_BYTES
        with taker() as beside:
            assert beside == CARD_BYTES - 2 * CONTEXT_BYTES
    with taker() as alone:
        assert alone == CARD_BYTES - CONTEXT_BYTES


class TestCaptures:
    """Rules of captures, on streams of their own."""

    @pytest.fixture
    def stream(self, card: Card) -> int:
        """One that captures."""
        stream = card.stream()
        card.call("cuStreamBeginCapture_v2", stream, GLOBAL)
        return stream

    def end(self, card: Card, stream: int) -> int:
        graph = u64()
        try:
            card.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        except Refused as refused:
            assert not graph.value
            return refused.code
        assert graph.value
        return 0

    def test_work_of_a_capture_is_not_done(self, card: Card, mapped: int, stream: int) -> None:
        target = ctypes.create_string_buffer(b"before")
        card.call("cuMemsetD8Async", mapped, 1, 6, 0)
        card.call("cuMemcpyDtoHAsync_v2", target, mapped, 6, stream)
        assert target.value == b"before"
        assert self.end(card, stream) == 0
        card.call("cuMemcpyDtoHAsync_v2", target, mapped, 6, stream)
        assert target.value == b"\1" * 6

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("cuStreamSynchronize", ("stream",)),
            ("cuStreamQuery", ("stream",)),
            ("cuCtxSynchronize", ()),
            ("cuMemAlloc_v2", (ctypes.byref(u64()), PAGE)),
            ("cuMemHostAlloc", (ctypes.byref(u64()), PAGE, 0)),
            ("cuModuleLoadData", (ctypes.byref(u64()), 0)),
            ("cuEventQuery", ("event",)),
            ("cuEventSynchronize", ("event",)),
        ],
    )
    def test_what_may_wait_is_refused_and_ends_the_capture(
        self, card: Card, name: str, arguments: tuple[Any, ...]
    ) -> None:
        handles = {"stream": card.stream(), "event": card.event()}
        card.call("cuEventRecord", handles["event"], handles["stream"])
        card.call("cuStreamBeginCapture_v2", handles["stream"], THREAD_LOCAL)
        told = [handles[one] if isinstance(one, str) else one for one in arguments]
        with pytest.raises(Refused) as caught:
            card.call(name, *told)
        assert caught.value.code == UNSUPPORTED
        with pytest.raises(Refused) as caught:
            card.call("cuMemsetD8Async", 0, 0, 0, handles["stream"])
        assert caught.value.code == LOST
        assert self.end(card, handles["stream"]) == LOST

    @pytest.mark.parametrize(
        ("mode", "own_mode", "outcome"),
        [(GLOBAL, GLOBAL, LOST), (GLOBAL, THREAD_LOCAL, 0), (THREAD_LOCAL, GLOBAL, 0)],
    )
    def test_other_threads_are_bound_by_global_captures_unless_they_say_so(
        self, card: Card, mode: int, own_mode: int, outcome: int
    ) -> None:
        stream = card.stream()
        card.call("cuStreamBeginCapture_v2", stream, mode)

        def allocate_elsewhere() -> None:
            card.begin()
            card.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(own_mode)))
            with contextlib.suppress(Refused):
                card.call("cuMemFree_v2", card.made("cuMemAlloc_v2", PAGE))

        with ThreadPoolExecutor(1) as pool:
            pool.submit(allocate_elsewhere).result()
        assert self.end(card, stream) == outcome

    @pytest.mark.parametrize(("is_joined", "outcome"), [(True, 0), (False, UNJOINED)])
    def test_a_stream_that_has_joined_is_waited_for(
        self, card: Card, stream: int, is_joined: bool, outcome: int
    ) -> None:
        other, fork, join = card.stream(), card.event(), card.event()
        card.call("cuEventRecord", fork, stream)
        card.call("cuStreamWaitEvent", other, fork, 0)
        card.call("cuMemsetD8Async", 0, 0, 0, other)
        card.call("cuEventRecord", join, other)
        if is_joined:
            card.call("cuStreamWaitEvent", stream, join, 0)
        assert self.end(card, stream) == outcome

    def test_events_of_a_capture_stay_inside_and_others_outside(
        self, card: Card, stream: int
    ) -> None:
        inside, outside = card.event(), card.event()
        card.call("cuEventRecord", inside, stream)
        card.call("cuEventRecord", outside, card.stream())
        with pytest.raises(Refused) as caught:
            card.call("cuStreamWaitEvent", stream, outside, 0)
        assert caught.value.code == ISOLATION
        assert self.end(card, stream) == LOST
        with pytest.raises(Refused) as caught:
            card.call("cuEventSynchronize", inside)
        assert caught.value.code == CAPTURED


def test_a_thread_without_a_context_can_do_nothing(card: Card) -> None:
    def create_stream() -> int:
        with pytest.raises(Refused) as caught:
            card.stream()
        return caught.value.code

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(create_stream).result() == NO_CONTEXT


def test_an_event_is_opened_by_other_processes_only(card: Card) -> None:
    handle = ctypes.create_string_buffer(64)
    card.call("cuIpcGetEventHandle", handle, card.event(NO_TIMING_INTERPROCESS))

    class Handle(ctypes.Structure):
        _fields_ = (("bytes", ctypes.c_char * 64),)

    with pytest.raises(Refused) as caught:
        card.made("cuIpcOpenEventHandle", Handle.from_buffer(handle))
    assert caught.value.code == NO_CONTEXT
