"""Requests that leave a worker with their KV, and those whose KV is on its way."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import pytest

from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.host import HostSlot, KvHostCache
from gpupoold.memory.kv import KvMemory
from gpupoold.memory.kv_transfers import Arrival, PeerSlot
from gpupoold.memory.transfers import Transfer
from gpupoold.wire import messages as m
from gpupoold.worker.kv.migrations import Moves
from tests.unit.memory.cuda_rig import NUM_PAGES, PAGE
from tests.unit.memory.fake_cuda import FakeCuda
from tests.unit.memory.ledger import MemoryLedger
from tests.unit.memory.rig import Rig, fill_blocks, geometry_of, read

if TYPE_CHECKING:
    from gpupoold.worker.engine.engine import ModelEngine
    from gpupoold.worker.kv.residency import Residency

HERE, THERE = 0, 1
WAIT_S = 30.0


class Engine:
    """A model with requests that have blocks."""

    def __init__(self, rig: Rig) -> None:
        self.name = "llama"
        self.kv: KvMemory
        self.ledger: MemoryLedger
        self.kv, self.ledger = rig.kv(geometry_of("layers-outermost"))
        self.kv.back(list(range(self.kv.geometry.num_chunks)))
        self._rig = rig
        self.blocks: dict[str, list[int]] = {}
        self.written: dict[int, bytes] = {}

    def ask(self, request_id: str, num_blocks: int) -> None:
        self.blocks[request_id] = self.ledger.allocate(num_blocks)
        self.written |= fill_blocks(self.kv, self.blocks[request_id], request_id)

    def full_blocks(self, request_id: str) -> list[int] | None:
        return self.blocks.get(request_id)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.ledger.release(self.blocks.pop(request_id))

    def export(
        self, name: str, blocks: Sequence[int], on_end: Callable[[bool], None]
    ) -> tuple[HostSlot, Transfer] | None:
        """As a residency that has this model only."""
        assert name == self.name
        return self.kv.export(blocks, self._rig.outs, on_end)


class Worker:
    """What moves stand on, and what they say; ``fds`` are those that went with messages."""

    def __init__(self, number: int, host_pages: int = 64) -> None:
        self.rig = Rig(host_pages=host_pages)
        self.engine = Engine(self.rig)
        self.said: list[m.Message] = []
        self.fds: list[int] = []
        self.moves = Moves(number, self.rig.device, self.rig.host, self._send)

    def _send(self, message: m.Message, fds: tuple[int, ...]) -> None:
        self.said.append(message)
        self.fds += [os.dup(fd) for fd in fds]

    def move_out(self, request_id: str) -> m.Moved:
        residency = cast("Residency", self.engine)
        self.moves.move_out(cast("ModelEngine", self.engine), residency, request_id)
        moved = self.said.pop()
        assert isinstance(moved, m.Moved)
        return moved

    def arrival(self) -> Arrival:
        """The other end of what was sent last."""
        return Arrival(self.fds.pop())

    def know(self, other: Worker, number: int) -> None:
        host = other.rig.host
        self.moves.peer_up(number, os.dup(host.fd), host.budget_bytes)

    def finish(self) -> None:
        self.engine.kv.finish_exports()

    def close(self) -> None:
        assert (self.moves.sent_bytes, self.moves.wake_fds, self.fds) == (0, [], [])
        self.moves.close()
        self.rig.close()


@pytest.fixture
def here() -> Iterator[Worker]:
    made = Worker(HERE)
    yield made
    made.moves.arrived()
    made.close()


@pytest.fixture
def there() -> Iterator[Worker]:
    """Another worker, with a request of three blocks."""
    made = Worker(THERE)
    made.engine.ask("r", 3)
    yield made
    made.moves.arrived()
    made.close()


class TestOut:
    def test_with_its_blocks(self, there: Worker) -> None:
        blocks, block_bytes = there.engine.blocks["r"], there.engine.kv.geometry.block_bytes
        moved = there.move_out("r")
        parcel = moved.parcel
        assert parcel is not None
        assert (moved.model, moved.request_id, moved.is_known) == ("llama", "r", True)
        assert (parcel.source, parcel.num_blocks) == (THERE, 3)
        assert sum(num_bytes for _, num_bytes in parcel.offsets) == 3 * block_bytes
        assert there.engine.blocks == {}
        there.finish()
        assert there.engine.ledger.live(blocks) == []
        arrival = there.arrival()
        assert arrival.has_arrived()
        arrival.close()
        assert there.moves.sent_bytes == 3 * block_bytes
        there.moves.free(parcel.parcel_id)
        assert (there.moves.sent_bytes, there.rig.host.used_bytes) == (0, 0)
        there.moves.free(parcel.parcel_id)
        there.moves.free("unknown")

    def test_ids_are_of_one_parcel_only(self, there: Worker) -> None:
        there.engine.ask("q", 1)
        ids = []
        for request_id in ("r", "q"):
            parcel = there.move_out(request_id).parcel
            assert parcel is not None
            ids.append(parcel.parcel_id)
            there.arrival().close()
        there.finish()
        assert len(set(ids)) == 2
        for parcel_id in ids:
            there.moves.free(parcel_id)

    def test_free_before_it_has_been_copied(self, there: Worker) -> None:
        """The memory is still being written to: nobody else may have it."""
        with there.rig.copies_held():
            parcel = there.move_out("r").parcel
            assert parcel is not None
            there.moves.free(parcel.parcel_id)
            there.moves.arrived()
            assert there.moves.sent_bytes == there.rig.host.used_bytes > 0
        there.finish()
        there.arrival().close()
        there.moves.arrived()
        assert there.moves.sent_bytes == there.rig.host.used_bytes == 0

    def test_a_copy_that_fails_is_told(self, there: Worker) -> None:
        there.rig.out_lane.error = OSError("the link is broken")
        parcel = there.move_out("r").parcel
        assert parcel is not None
        there.finish()
        arrival = there.arrival()
        assert arrival.is_told()
        assert not arrival.has_arrived()
        arrival.close()
        there.moves.free(parcel.parcel_id)

    def test_unknown(self, there: Worker) -> None:
        assert there.move_out("nobody") == m.Moved("llama", "nobody", is_known=False)
        assert there.fds == []

    def test_without_a_full_block(self, there: Worker) -> None:
        there.engine.ask("short", 0)
        assert there.move_out("short") == m.Moved("llama", "short")
        assert "short" not in there.engine.blocks
        assert there.fds == []

    def test_without_room_in_the_host_cache(self) -> None:
        full = Worker(THERE, host_pages=1)
        full.engine.ask("r", 3)
        assert full.move_out("r") == m.Moved("llama", "r")
        assert (full.engine.blocks, full.fds) == ({}, [])
        full.close()


class TestIn:
    @pytest.fixture
    def parcel(self, here: Worker, there: Worker) -> Iterator[m.Parcel]:
        """The request's, which is freed when it has been told of as used; and only then."""
        here.know(there, THERE)
        self.written = [there.engine.written[block] for block in there.engine.blocks["r"]]
        parcel = there.move_out("r").parcel
        assert parcel is not None
        there.finish()
        yield parcel
        assert here.said == [m.ParcelUsed(parcel.parcel_id, THERE)]
        here.moves.peer_down(THERE)
        there.moves.free(parcel.parcel_id)
        for fd in there.fds:
            os.close(fd)
        there.fds.clear()

    def order(self, parcel: m.Parcel) -> m.AddRequest:
        return m.AddRequest("llama", "r", 0.0, 1, 8, [b""], [0], is_moving=True, parcel=parcel)

    def test_it_has_the_bytes(self, here: Worker, there: Worker, parcel: m.Parcel) -> None:
        order = self.order(parcel)
        here.moves.expect(order, there.arrival())
        assert len(here.moves.wake_fds) == 1
        [(message, slot)] = here.moves.arrived()
        assert message is order
        assert slot is not None
        assert here.moves.wake_fds == []
        laid = slot.beside([(0, slot.num_bytes)])
        data = b"".join(read(address, num_bytes) for _, address, num_bytes in laid)
        rows = there.engine.kv.geometry.rows
        size = rows[0].num_bytes
        parts = [
            block[size * n : size * (n + 1)] for n in range(len(rows)) for block in self.written
        ]
        assert data == b"".join(parts)
        assert here.said == []
        slot.free()

    def test_it_waits_until_it_is_told(self, here: Worker, parcel: m.Parcel) -> None:
        arrival = Arrival()
        teller = Arrival(os.dup(arrival.fd))
        here.moves.expect(self.order(parcel), arrival)
        assert here.moves.arrived() == []
        teller.tell(True)
        [(_, slot)] = here.moves.arrived()
        assert slot is not None
        slot.free()
        teller.close()

    def test_a_copy_that_failed(self, here: Worker, parcel: m.Parcel) -> None:
        arrival = Arrival()
        arrival.tell(False)
        here.moves.expect(self.order(parcel), arrival)
        [(message, slot)] = here.moves.arrived()
        assert (message.request_id, slot) == ("r", None)

    def test_a_sender_that_dies_before_it_came(self, here: Worker, parcel: m.Parcel) -> None:
        here.moves.expect(self.order(parcel), Arrival())
        here.moves.peer_down(THERE)
        [(message, slot)] = here.moves.arrived()
        assert (message.request_id, slot) == ("r", None)
        assert here.moves.arrived() == []

    def test_a_sender_that_is_replaced_before_it_came(
        self, here: Worker, there: Worker, parcel: m.Parcel
    ) -> None:
        here.moves.expect(self.order(parcel), Arrival())
        here.know(there, THERE)
        assert [slot for _, slot in here.moves.arrived()] == [None]

    def test_another_that_dies(self, here: Worker, there: Worker, parcel: m.Parcel) -> None:
        here.know(there, 2)
        arrival = Arrival()
        here.moves.expect(self.order(parcel), arrival)
        here.moves.peer_down(2)
        here.moves.peer_down(7)  # nobody knows it
        assert here.moves.arrived() == []
        arrival.tell(True)
        [(_, slot)] = here.moves.arrived()
        assert slot is not None
        slot.free()

    def test_a_sender_that_dies_when_it_has_come(
        self, here: Worker, there: Worker, parcel: m.Parcel
    ) -> None:
        """Its memory is there as long as it is read, whether that has been seen or not."""
        here.moves.expect(self.order(parcel), there.arrival())
        here.moves.peer_down(THERE)
        [(_, slot)] = here.moves.arrived()
        assert slot is not None
        [(_, address, _), *_] = slot.beside([(0, slot.num_bytes)])
        assert read(address, 16) == self.written[0][:16]
        slot.free()

    def test_a_sender_that_nobody_knows(
        self, here: Worker, there: Worker, parcel: m.Parcel
    ) -> None:
        here.moves.peer_down(THERE)
        here.moves.expect(self.order(parcel), there.arrival())
        [(message, slot)] = here.moves.arrived()
        assert (message.request_id, slot) == ("r", None)

    @pytest.mark.parametrize("is_known", [True, False])
    def test_a_request_that_ends_on_the_way(
        self, here: Worker, parcel: m.Parcel, is_known: bool
    ) -> None:
        if not is_known:
            here.moves.peer_down(THERE)
        here.moves.expect(self.order(parcel), Arrival())
        here.moves.abort(["another"])
        assert len(here.moves.wake_fds) == 1
        here.moves.abort(["r", "r"])
        assert (here.moves.wake_fds, here.moves.arrived()) == ([], [])

    def test_memory_that_cannot_be_mapped(
        self, here: Worker, there: Worker, parcel: m.Parcel
    ) -> None:
        """Requests from there are computed anew."""
        here.moves.peer_up(THERE, os.memfd_create("empty"), 0)
        here.moves.expect(self.order(parcel), there.arrival())
        assert [slot for _, slot in here.moves.arrived()] == [None]


class GatedCuda(FakeCuda):
    """A driver whose registrations take as long as the test wants."""

    def __init__(self) -> None:
        super().__init__(total_bytes=NUM_PAGES * PAGE)
        self.may_register = threading.Event()

    def register_host(self, address: int, num_bytes: int) -> None:
        assert self.may_register.wait(WAIT_S)
        super().register_host(address, num_bytes)


class Gpu:
    """Moves of a worker on a GPU with that driver."""

    def __init__(self) -> None:
        self.driver = GatedCuda()
        self.device = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=self.driver)
        self.host = KvHostCache(0)
        self.said: list[m.Message] = []
        self.moves = Moves(HERE, self.device, self.host, lambda message, _: self._say(message))

    def _say(self, message: m.Message) -> None:
        self.said.append(message)

    def slots(self, there: Worker, request_id: str) -> list[PeerSlot | None]:
        """With what KV a request arrives that leaves ``there`` now."""
        parcel = there.move_out(request_id).parcel
        assert parcel is not None
        there.finish()
        order = m.AddRequest("llama", request_id, 0.0, 1, 8, [b""], [0], parcel=parcel)
        self.moves.expect(order, there.arrival())
        found = [slot for _, slot in self.moves.arrived()]
        for slot in found:
            if slot is not None:
                slot.free()
        assert self.said == [m.ParcelUsed(parcel.parcel_id, THERE)]
        self.said.clear()
        there.moves.free(parcel.parcel_id)
        return found

    def close(self) -> None:
        self.driver.may_register.set()
        self.moves.close()
        self.host.close()
        self.device.close()
        assert self.driver.leaks == {}


class TestPeersOfAGpu:
    """Host memory is registered by a thread; until that is done requests come without KV."""

    @pytest.fixture
    def gpu(self) -> Iterator[Gpu]:
        made = Gpu()
        yield made
        made.close()

    def know(self, gpu: Gpu, there: Worker) -> None:
        host = there.rig.host
        gpu.moves.peer_up(THERE, os.dup(host.fd), host.budget_bytes)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < ends_s
            time.sleep(0.001)

    def test_while_its_memory_is_being_registered(self, gpu: Gpu, there: Worker) -> None:
        there.engine.ask("q", 1)
        self.know(gpu, there)  # returns, though the driver does not
        assert gpu.slots(there, "r") == [None]
        gpu.driver.may_register.set()
        self.wait_until(lambda: bool(gpu.driver.registrations))
        gpu.moves._thread.submit(int).result(WAIT_S)
        assert [slot is not None for slot in gpu.slots(there, "q")] == [True]

    def test_whose_memory_cannot_be_registered(
        self, gpu: Gpu, there: Worker, caplog: pytest.LogCaptureFixture
    ) -> None:
        gpu.driver.fail_at["register_host"] = 1
        gpu.driver.may_register.set()
        self.know(gpu, there)
        self.wait_until(lambda: "cannot be pinned" in caplog.text)
        assert gpu.slots(there, "r") == [None]

    def test_that_dies_while_its_memory_is_being_registered(self, gpu: Gpu, there: Worker) -> None:
        self.know(gpu, there)
        gpu.moves.peer_down(THERE)
        self.know(gpu, there)
        gpu.driver.may_register.set()
        self.wait_until(lambda: len(gpu.driver.registrations) == 1)


def test_requests_go_on_in_the_order_in_which_they_came(here: Worker) -> None:
    arrivals = [Arrival() for _ in range(3)]
    tellers = [Arrival(os.dup(one.fd)) for one in arrivals]
    here.know(here, THERE)
    for number, arrival in enumerate(arrivals):
        parcel = m.Parcel(f"p{number}", THERE, 1, [(0, 1)])
        order = m.AddRequest("llama", f"r{number}", 0.0, 1, 8, [b""], [0], parcel=parcel)
        here.moves.expect(order, arrival)
    for number in (2, 0):
        tellers[number].tell(number == 0)
    arrived = here.moves.arrived()
    assert [message.request_id for message, _ in arrived] == ["r0", "r2"]
    assert [slot is not None for _, slot in arrived] == [True, False]
    here.moves.abort(["r1"])
    for _, slot in arrived:
        if slot is not None:
            slot.free()
    here.moves.peer_down(THERE)
    for teller in tellers:
        teller.close()
    assert sorted(str(one) for one in here.said) == [
        str(m.ParcelUsed(f"p{number}", THERE)) for number in range(3)
    ]
