"""What each thread of a worker is doing, in memory that outlives the worker.

The daemon makes the page (a memfd) and passes its descriptor when it starts a worker. The threads
of the worker write to slots of their own; after the worker's death the daemon reads all slots.
Little is imported: simulated devices use this module too.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import queue
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from gpupoold.system.sealed_memory import create_sealed_memfd

NUM_SLOTS = 32
SLOT_BYTES = 4096
PAGE_BYTES = NUM_SLOTS * SLOT_BYTES

_MAIN, _STEPS, _FIRST_SHARED, _FIRST_OF_GRAMMARS = 0, (1, 2), 3, 20
# A slot: phase, bytes of the model's name, number of requests (_ALL: all of the model); then the
# name, then 8 bytes for each request.
_HEADER = struct.Struct("<BxHi")
_NAME_AT = _HEADER.size
_MAX_NAME_BYTES = 512
_REQUESTS_AT = _NAME_AT + _MAX_NAME_BYTES
_MAX_REQUESTS = (SLOT_BYTES - _REQUESTS_AT) // 8
_ALL = -1


class ThreadPhase(IntEnum):
    """What a thread is doing. The comments say what a crash in the phase can be due to."""

    IDLE = 0
    LOAD = 1  # the model
    PROFILE = 2  # the model
    SELF_CHECK = 3  # the model
    SWITCH = 4  # the model
    SNAPSHOT = 5  # the model: its weights snapshot is mapped or unmapped
    ADD_REQUEST = 6  # the request
    GRAMMAR = 7  # the request
    STEP = 8  # one of the requests of the step
    COPY = 9  # unknown: bytes of some model are copied beside the steps

    @property
    def is_due_to_model(self) -> bool:
        """True if a crash in the phase is due to the model, and to no request."""
        return ThreadPhase.LOAD <= self <= ThreadPhase.SNAPSHOT

    @property
    def text(self) -> str:
        """The phase in words, for "it was in ..."."""
        return _TEXTS[self]


_TEXTS = {
    ThreadPhase.IDLE: "no work",
    ThreadPhase.LOAD: "the load of",
    ThreadPhase.PROFILE: "the timing of steps of",
    ThreadPhase.SELF_CHECK: "the self-check of",
    ThreadPhase.SWITCH: "a switch to",
    ThreadPhase.SNAPSHOT: "mapping the weights snapshot of",
    ThreadPhase.ADD_REQUEST: "adding a request to",
    ThreadPhase.GRAMMAR: "compiling a grammar for",
    ThreadPhase.STEP: "a step of",
    ThreadPhase.COPY: "copying beside the steps",
}


@dataclass(frozen=True, slots=True)
class Activity:
    """What one thread was doing.

    ``requests`` are digests (:func:`digest`) of the ids of the requests concerned; None: all
    requests of ``model`` that the worker had.
    """

    phase: ThreadPhase
    model: str
    requests: frozenset[int] | None = frozenset()


def digest(request_id: str) -> int:
    """64 bits that stand for a request id, which may be long."""
    raw = request_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def create_page() -> int:
    """Descriptor of a new page, all of whose slots are idle.

    Raises:
        OSError: there is no descriptor or no memory left.
    """
    return create_sealed_memfd("gpupool-activity", PAGE_BYTES)


def read_page(fd: int) -> list[Activity]:
    """What the threads of a worker that has died were doing; idle threads are left out."""
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
    """A part of the page that one thread at a time writes to."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        self._at = offset
        self._model = ""
        self._ids: Sequence[str] | None = ()
        self._digests: dict[str, int] = {}
        _HEADER.pack_into(memory, offset, ThreadPhase.IDLE, 0, 0)

    @property
    def phase(self) -> int:
        """The phase that is in the slot."""
        return self._memory[self._at]

    def set(self, phase: ThreadPhase, model: str = "", ids: Sequence[str] | None = ()) -> None:
        """Write what the thread begins to do; ``ids`` None: it concerns all of the model's
        requests. A phase whose model and requests are those of the last takes 0.2 us."""
        if model != self._model or ids != self._ids:
            self._memory[self._at] = ThreadPhase.IDLE  # a death in between is nobody's
            self._describe(model, ids)
        self._memory[self._at] = phase

    def clear(self) -> None:
        """Write that the thread does nothing now."""
        self._memory[self._at] = ThreadPhase.IDLE

    @contextlib.contextmanager
    def doing(self, phase: ThreadPhase, model: str = "", ids: Sequence[str] = ()) -> Iterator[None]:
        """Write what is done inside.

        An exception leaves the slot as it is: if nobody handles it, the worker ends by it.
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
            digests = self._digests_of(ids)
            struct.pack_into(f"<{num_requests}Q", self._memory, self._at + _REQUESTS_AT, *digests)
        self._memory[self._at + _NAME_AT : self._at + _NAME_AT + len(name)] = name
        _HEADER.pack_into(self._memory, self._at, ThreadPhase.IDLE, len(name), num_requests)

    def _digests_of(self, ids: Collection[str]) -> Iterable[int]:
        known = self._digests
        self._digests = {one: known.get(one) or digest(one) for one in ids}
        return self._digests.values()


class ActivityPage:
    """All slots of this process: of the step thread, of its steps, and of other threads.

    Until :meth:`attach` they are in memory that nobody else reads.
    """

    def __init__(self) -> None:
        # Private: a process that is forked later has a page of its own.
        self._use(mmap.mmap(-1, PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def attach(self, fd: int) -> None:
        """Write to the page behind ``fd`` from now on; for before threads are started."""
        self._use(mmap.mmap(fd, PAGE_BYTES))
        os.close(fd)

    @property
    def is_alone(self) -> bool:
        """True if no thread but the step thread does anything that could end the worker."""
        return all(slot.phase == ThreadPhase.IDLE for slot in self._shared)

    @contextlib.contextmanager
    def beside(
        self, phase: ThreadPhase, model: str = "", ids: Sequence[str] = ()
    ) -> Iterator[None]:
        """Write what a thread beside the step thread does inside; waits while more threads work
        than there are slots. Grammars have slots of their own, so that copies never wait for
        them."""
        free = self._free_of_grammars if phase is ThreadPhase.GRAMMAR else self._free
        slot = free.get()
        slot.set(phase, model, ids)
        try:
            yield
        finally:
            slot.clear()
            free.put(slot)

    def begin_step(self, model: str, ids: Sequence[str]) -> None:
        """Write that a step is made with these requests. The step before it may be under way:
        its requests stay written, in the other slot of steps."""
        self._steps.reverse()
        self._steps[0].set(ThreadPhase.STEP, model, ids)

    def end_steps(self, num_under_way: int = 0) -> None:
        """Write that no step is under way but the last ``num_under_way``."""
        for slot in self._steps[num_under_way:]:
            slot.clear()

    def _use(self, memory: mmap.mmap) -> None:
        slots = [ThreadSlot(memory, number * SLOT_BYTES) for number in range(NUM_SLOTS)]
        self.main = slots[_MAIN]
        self._steps = [slots[number] for number in _STEPS]
        self._shared = slots[_FIRST_SHARED:]
        self._free = _queue_of(slots[_FIRST_SHARED:_FIRST_OF_GRAMMARS])
        self._free_of_grammars = _queue_of(slots[_FIRST_OF_GRAMMARS:])


def _queue_of(slots: Iterable[ThreadSlot]) -> queue.SimpleQueue[ThreadSlot]:
    made: queue.SimpleQueue[ThreadSlot] = queue.SimpleQueue()
    for slot in slots:
        made.put(slot)
    return made


WORKER = ActivityPage()
"""Of this process."""
