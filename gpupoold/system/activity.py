"""The activity of each thread of a worker, in memory that survives the worker.

The daemon creates the page (a memfd) and passes the descriptor to a new worker. Each thread of the
worker writes to its own slots; after the worker's death the daemon reads all slots. The module
imports little, because simulated devices use the module too.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import queue
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from gpupoold.system.kernel_memory import create_sealed_memfd

NUM_SLOTS = 32
SLOT_BYTES = 4096
PAGE_BYTES = NUM_SLOTS * SLOT_BYTES

_MAIN, _STEPS, _REPORT, _FIRST_SHARED, _FIRST_OF_GRAMMARS = 0, (1, 2), 3, 4, 20
# Header of a slot: phase, bytes of the model's name, number of requests (_ALL: all requests of the
# model). The name follows, then 8 bytes for each request.
_HEADER = struct.Struct("<BxHi")
_NAME_AT = _HEADER.size
_MAX_NAME_BYTES = 512
_REQUESTS_AT = _NAME_AT + _MAX_NAME_BYTES
_MAX_REQUESTS = (SLOT_BYTES - _REQUESTS_AT) // 8
_ALL = -1


class ThreadPhase(IntEnum):
    """A phase of a thread's work; comments name the possible culprits of a crash in the phase."""

    IDLE = 0
    LOAD = 1  # the model
    PROFILE = 2  # the model
    SELF_CHECK = 3  # the model
    SWITCH = 4  # the model
    SNAPSHOT = 5  # the model: its weights snapshot is mapped or unmapped
    CAPTURE = 6  # the model
    ADD_REQUEST = 7  # the request
    GRAMMAR = 8  # the request
    STEP = 9  # one of the requests of the step
    COPY = 10  # unknown: bytes of a model are copied during steps

    @property
    def is_due_to_model(self) -> bool:
        """True if a crash in the phase is due to the model, and to no request."""
        return ThreadPhase.LOAD <= self <= ThreadPhase.CAPTURE

    @property
    def text(self) -> str:
        """The phase in words, to complete "the worker was in ..."."""
        return _TEXTS[self]


_TEXTS = {
    ThreadPhase.IDLE: "no work",
    ThreadPhase.LOAD: "the load of",
    ThreadPhase.PROFILE: "the timing of steps of",
    ThreadPhase.SELF_CHECK: "the self-check of",
    ThreadPhase.SWITCH: "a switch to",
    ThreadPhase.SNAPSHOT: "mapping the weights snapshot of",
    ThreadPhase.CAPTURE: "the capture of graphs of",
    ThreadPhase.ADD_REQUEST: "adding a request to",
    ThreadPhase.GRAMMAR: "compiling a grammar for",
    ThreadPhase.STEP: "a step of",
    ThreadPhase.COPY: "copying beside the steps",
}


@dataclass(frozen=True, slots=True)
class Activity:
    """The activity of one thread.

    ``requests`` has digests (:func:`digest`) of the requests' ids; None means all requests of
    ``model`` on the worker.
    """

    phase: ThreadPhase
    model: str
    requests: frozenset[int] | None = frozenset()


def digest(request_id: str) -> int:
    """Return 64 bits in place of a request id, which may be long."""
    raw = request_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def create_page() -> int:
    """Return the descriptor of a new page whose slots are all idle.

    Raises OSError: there is no descriptor or no memory left.
    """
    return create_sealed_memfd("gpupool-activity", PAGE_BYTES)


def read_page(fd: int) -> list[Activity]:
    """Return the activities of a dead worker's threads, without idle threads."""
    raw = os.pread(fd, PAGE_BYTES, 0)
    slots = (raw[at : at + SLOT_BYTES] for at in range(0, len(raw), SLOT_BYTES))
    return [activity for slot in slots if (activity := _parse(slot)) is not None]


def _parse(slot: bytes) -> Activity | None:
    phase, num_name_bytes, num_requests = _HEADER.unpack_from(slot)
    if phase not in iter(ThreadPhase) or phase == ThreadPhase.IDLE:
        return None
    name_end = _NAME_AT + min(num_name_bytes, _MAX_NAME_BYTES)
    model = slot[_NAME_AT:name_end].decode("utf-8", "replace")
    if not 0 <= num_requests <= _MAX_REQUESTS:
        return Activity(ThreadPhase(phase), model, None)
    digests = struct.unpack_from(f"<{num_requests}Q", slot, _REQUESTS_AT)
    return Activity(ThreadPhase(phase), model, frozenset(digests))


class ThreadSlot:
    """A part of the page with one writing thread at a time."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        self._at = offset
        self._model = ""
        self._ids: Sequence[str] | None = ()
        self._digests: dict[str, int] = {}
        _HEADER.pack_into(memory, offset, ThreadPhase.IDLE, 0, 0)

    @property
    def phase(self) -> int:
        """The phase in the slot."""
        return self._memory[self._at]

    def set(self, phase: ThreadPhase, model: str = "", ids: Sequence[str] | None = ()) -> None:
        """Write the start of a phase; ``ids`` None means all requests of the model.

        Repeating the last model and requests takes 0.2 us.
        """
        if model != self._model or ids != self._ids:
            self._memory[self._at] = ThreadPhase.IDLE  # a crash meanwhile has no culprit
            self._describe(model, ids)
        self._memory[self._at] = phase

    def clear(self) -> None:
        """Write that the thread is idle."""
        self._memory[self._at] = ThreadPhase.IDLE

    @contextlib.contextmanager
    def doing(self, phase: ThreadPhase, model: str = "", ids: Sequence[str] = ()) -> Iterator[None]:
        """Write a phase for the duration of the context.

        After an exception the slot stays: an unhandled exception ends the worker.
        """
        before = self.phase, self._model, self._ids
        self.set(phase, model, ids)
        yield
        self.set(ThreadPhase(before[0]), *before[1:])

    def _describe(self, model: str, ids: Sequence[str] | None) -> None:
        self._model, self._ids = model, ids
        name = model.encode("utf-8", "surrogatepass")[:_MAX_NAME_BYTES]
        num_requests = _ALL
        if ids is not None and len(ids) <= _MAX_REQUESTS:
            num_requests = len(ids)
            known = self._digests
            self._digests = {
                request_id: known.get(request_id) or digest(request_id) for request_id in ids
            }
            digests = self._digests.values()
            struct.pack_into(f"<{num_requests}Q", self._memory, self._at + _REQUESTS_AT, *digests)
        self._memory[self._at + _NAME_AT : self._at + _NAME_AT + len(name)] = name
        _HEADER.pack_into(self._memory, self._at, ThreadPhase.IDLE, len(name), num_requests)


class ActivityPage:
    """The slots of this process: of the step thread, of its steps and their report, of others.

    Before :meth:`attach` the slots are in private memory.
    """

    def __init__(self) -> None:
        # Private, so that a process forked later has a separate page.
        self._use(mmap.mmap(-1, PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def attach(self, fd: int) -> None:
        """Write to the page behind ``fd`` from now on; call before other threads start."""
        self._use(mmap.mmap(fd, PAGE_BYTES))
        os.close(fd)

    @property
    def is_alone(self) -> bool:
        """True if only the step thread does work that could end the worker."""
        return all(slot.phase == ThreadPhase.IDLE for slot in self._shared)

    @contextlib.contextmanager
    def beside(
        self, phase: ThreadPhase, model: str = "", ids: Sequence[str] = ()
    ) -> Iterator[None]:
        """Write a phase of a thread other than the step thread for the duration of the context.

        Waits while all slots are taken. Grammars have separate slots, so copies never wait for
        grammars.
        """
        free = self._free_of_grammars if phase is ThreadPhase.GRAMMAR else self._free
        slot = free.get()
        slot.set(phase, model, ids)
        try:
            yield
        finally:
            slot.clear()
            free.put(slot)

    def begin_scheduling(self, model: str) -> None:
        """Write that any request of the model may come into a step, until ``begin_step``.

        No effect during another phase of the step thread.
        """
        if self.main.phase == ThreadPhase.IDLE:
            self.main.set(ThreadPhase.STEP, model, None)

    def begin_step(self, model: str, ids: Sequence[str]) -> None:
        """Write the start of a step with these requests.

        The previous step may still run: its requests stay in the other slot of steps.
        """
        self._steps.reverse()
        self._steps[0].set(ThreadPhase.STEP, model, ids)
        self._end_scheduling()

    def begin_report(self, model: str, ids: Sequence[str]) -> None:
        """Write that the results of a step are reported, until ``end_report``.

        After an exception the slot stays. The slot is a separate one, because the requests of
        successive steps are mostly the same.
        """
        self._report.set(ThreadPhase.STEP, model, ids)

    def end_report(self) -> None:
        """Write that no results are reported."""
        self._report.clear()

    def end_steps(self, num_under_way: int = 0) -> None:
        """Write that only the last ``num_under_way`` steps run."""
        for slot in self._steps[num_under_way:]:
            slot.clear()
        self._end_scheduling()

    def _end_scheduling(self) -> None:
        if self.main.phase == ThreadPhase.STEP:
            self.main.clear()

    def _use(self, memory: mmap.mmap) -> None:
        slots = [ThreadSlot(memory, number * SLOT_BYTES) for number in range(NUM_SLOTS)]
        self.main = slots[_MAIN]
        self._steps = [slots[number] for number in _STEPS]
        self._report = slots[_REPORT]
        self._shared = slots[_FIRST_SHARED:]
        self._free = _queue_of(slots[_FIRST_SHARED:_FIRST_OF_GRAMMARS])
        self._free_of_grammars = _queue_of(slots[_FIRST_OF_GRAMMARS:])


def _queue_of(slots: Iterable[ThreadSlot]) -> queue.SimpleQueue[ThreadSlot]:
    made: queue.SimpleQueue[ThreadSlot] = queue.SimpleQueue()
    for slot in slots:
        made.put(slot)
    return made


WORKER = ActivityPage()  # of this process
