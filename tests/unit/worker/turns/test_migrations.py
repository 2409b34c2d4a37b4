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
from gpupoold.memory.transfers import Arrival, PeerSlot, Transfer
from gpupoold.wire import messages as m
from gpupoold.worker.engine.block_demand import ComputedKv
from gpupoold.worker.turns.requests import KvMigrations
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
        self.kv.map(list(range(self.kv.geometry.num_extents)))
        self._rig = rig
        self.blocks: dict[str, list[int]] = {}
        self.written: dict[int, bytes] = {}

    def ask(self, request_id: str, num_blocks: int) -> None:
        self.blocks[request_id] = self.ledger.allocate(num_blocks)
        self.written |= fill_blocks(self.kv, self.blocks[request_id], request_id)

    def computed_kv(self, request_id: str) -> ComputedKv | None:
        blocks = self.blocks.get(request_id)
        return None if blocks is None else ComputedKv(blocks, 16 * len(blocks))

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
        self.migrations = KvMigrations(number, self.rig.device, self.rig.host, self._send)

    def _send(self, message: m.Message, fds: tuple[int, ...]) -> None:
        self.said.append(message)
        self.fds += [os.dup(fd) for fd in fds]

    def migrate_out(self, request_id: str) -> m.Migrated:
        residency = cast("Residency", self.engine)
        self.migrations.migrate_out(cast("ModelEngine", self.engine), residency, request_id)
        moved = self.said.pop()
        assert isinstance(moved, m.Migrated)
        return moved

    def arrival(self) -> Arrival:
        """The other end of what was sent last."""
        return Arrival(self.fds.pop())

    def know(self, other: Worker, number: int) -> None:
        host = other.rig.host
        self.migrations.peer_up(number, os.dup(host.fd), host.budget_bytes)

    def finish(self) -> None:
        self.engine.kv.finish_exports()

    def close(self) -> None:
        assert (self.migrations.sent_bytes, self.migrations.wake_fds, self.fds) == (0, [], [])
        self.migrations.close()
        self.rig.close()


@pytest.fixture
def here() -> Iterator[Worker]:
    made = Worker(HERE)
    yield made
    made.migrations.arrived()
    made.close()


@pytest.fixture
def there() -> Iterator[Worker]:
    """Another worker, with a request of three blocks."""
    made = Worker(THERE)
    made.engine.ask("r", 3)
    yield made
    made.migrations.arrived()
    made.close()


class TestOut:
    def test_with_its_blocks(self, there: Worker) -> None:
        blocks, block_bytes = there.engine.blocks["r"], there.engine.kv.geometry.block_bytes
        moved = there.migrate_out("r")
        kv_transfer = moved.kv_transfer
        assert kv_transfer is not None
        assert (moved.model, moved.request_id, moved.is_known) == ("llama", "r", True)
        assert (kv_transfer.source, kv_transfer.num_blocks) == (THERE, 3)
        assert kv_transfer.num_computed_tokens == 48
        assert sum(num_bytes for _, num_bytes in kv_transfer.offsets) == 3 * block_bytes
        assert there.engine.blocks == {}
        there.finish()
        assert there.engine.ledger.live(blocks) == []
        arrival = there.arrival()
        assert arrival.has_arrived()
        arrival.close()
        assert there.migrations.sent_bytes == 3 * block_bytes
        there.migrations.free(kv_transfer.transfer_id)
        assert (there.migrations.sent_bytes, there.rig.host.used_bytes) == (0, 0)
        there.migrations.free(kv_transfer.transfer_id)
        there.migrations.free("unknown")

    def test_ids_are_of_one_kv_transfer_only(self, there: Worker) -> None:
        there.engine.ask("q", 1)
        ids = []
        for request_id in ("r", "q"):
            kv_transfer = there.migrate_out(request_id).kv_transfer
            assert kv_transfer is not None
            ids.append(kv_transfer.transfer_id)
            there.arrival().close()
        there.finish()
        assert len(set(ids)) == 2
        for transfer_id in ids:
            there.migrations.free(transfer_id)

    def test_free_before_it_has_been_copied(self, there: Worker) -> None:
        """The memory is still being written to: nobody else may have it."""
        with there.rig.copies_held():
            kv_transfer = there.migrate_out("r").kv_transfer
            assert kv_transfer is not None
            there.migrations.free(kv_transfer.transfer_id)
            there.migrations.arrived()
            assert there.migrations.sent_bytes == there.rig.host.used_bytes > 0
        there.finish()
        there.arrival().close()
        there.migrations.arrived()
        assert there.migrations.sent_bytes == there.rig.host.used_bytes == 0

    def test_a_copy_that_fails_is_told(self, there: Worker) -> None:
        there.rig.out_copy_stream.error = OSError("the link is broken")
        kv_transfer = there.migrate_out("r").kv_transfer
        assert kv_transfer is not None
        there.finish()
        arrival = there.arrival()
        assert arrival.is_signalled()
        assert not arrival.has_arrived()
        arrival.close()
        there.migrations.free(kv_transfer.transfer_id)

    def test_unknown(self, there: Worker) -> None:
        assert there.migrate_out("nobody") == m.Migrated("llama", "nobody", is_known=False)
        assert there.fds == []

    def test_without_a_full_block(self, there: Worker) -> None:
        there.engine.ask("short", 0)
        assert there.migrate_out("short") == m.Migrated("llama", "short")
        assert "short" not in there.engine.blocks
        assert there.fds == []

    def test_without_room_in_the_host_cache(self) -> None:
        full = Worker(THERE, host_pages=1)
        full.engine.ask("r", 3)
        assert full.migrate_out("r") == m.Migrated("llama", "r")
        assert (full.engine.blocks, full.fds) == ({}, [])
        full.close()


class TestIn:
    @pytest.fixture
    def kv_transfer(self, here: Worker, there: Worker) -> Iterator[m.KvTransfer]:
        """The request's, which is freed when it has been told of as used; and only then."""
        here.know(there, THERE)
        self.written = [there.engine.written[block] for block in there.engine.blocks["r"]]
        kv_transfer = there.migrate_out("r").kv_transfer
        assert kv_transfer is not None
        there.finish()
        yield kv_transfer
        assert here.said == [m.KvTransferUsed(kv_transfer.transfer_id, THERE)]
        here.migrations.peer_down(THERE)
        there.migrations.free(kv_transfer.transfer_id)
        for fd in there.fds:
            os.close(fd)
        there.fds.clear()

    def order(self, kv_transfer: m.KvTransfer) -> m.AddRequest:
        return m.AddRequest(
            "llama", "r", 0.0, 1, 8, [b""], [0], is_moving=True, kv_transfer=kv_transfer
        )

    def test_it_has_the_bytes(self, here: Worker, there: Worker, kv_transfer: m.KvTransfer) -> None:
        order = self.order(kv_transfer)
        here.migrations.expect(order, there.arrival())
        assert len(here.migrations.wake_fds) == 1
        [(message, slot)] = here.migrations.arrived()
        assert message is order
        assert slot is not None
        assert here.migrations.wake_fds == []
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

    def test_it_waits_until_it_is_told(self, here: Worker, kv_transfer: m.KvTransfer) -> None:
        arrival = Arrival()
        teller = Arrival(os.dup(arrival.fd))
        here.migrations.expect(self.order(kv_transfer), arrival)
        assert here.migrations.arrived() == []
        teller.signal(True)
        [(_, slot)] = here.migrations.arrived()
        assert slot is not None
        slot.free()
        teller.close()

    def test_a_copy_that_failed(self, here: Worker, kv_transfer: m.KvTransfer) -> None:
        arrival = Arrival()
        arrival.signal(False)
        here.migrations.expect(self.order(kv_transfer), arrival)
        [(message, slot)] = here.migrations.arrived()
        assert (message.request_id, slot) == ("r", None)

    def test_a_sender_that_dies_before_it_came(
        self, here: Worker, kv_transfer: m.KvTransfer
    ) -> None:
        here.migrations.expect(self.order(kv_transfer), Arrival())
        here.migrations.peer_down(THERE)
        [(message, slot)] = here.migrations.arrived()
        assert (message.request_id, slot) == ("r", None)
        assert here.migrations.arrived() == []

    def test_a_sender_that_is_replaced_before_it_came(
        self, here: Worker, there: Worker, kv_transfer: m.KvTransfer
    ) -> None:
        here.migrations.expect(self.order(kv_transfer), Arrival())
        here.know(there, THERE)
        assert [slot for _, slot in here.migrations.arrived()] == [None]

    def test_another_that_dies(
        self, here: Worker, there: Worker, kv_transfer: m.KvTransfer
    ) -> None:
        here.know(there, 2)
        arrival = Arrival()
        here.migrations.expect(self.order(kv_transfer), arrival)
        here.migrations.peer_down(2)
        here.migrations.peer_down(7)  # nobody knows it
        assert here.migrations.arrived() == []
        arrival.signal(True)
        [(_, slot)] = here.migrations.arrived()
        assert slot is not None
        slot.free()

    def test_a_sender_that_dies_when_it_has_come(
        self, here: Worker, there: Worker, kv_transfer: m.KvTransfer
    ) -> None:
        """Its memory is there as long as it is read, whether that has been seen or not."""
        here.migrations.expect(self.order(kv_transfer), there.arrival())
        here.migrations.peer_down(THERE)
        [(_, slot)] = here.migrations.arrived()
        assert slot is not None
        [(_, address, _), *_] = slot.beside([(0, slot.num_bytes)])
        assert read(address, 16) == self.written[0][:16]
        slot.free()

    def test_a_sender_that_nobody_knows(
        self, here: Worker, there: Worker, kv_transfer: m.KvTransfer
    ) -> None:
        here.migrations.peer_down(THERE)
        here.migrations.expect(self.order(kv_transfer), there.arrival())
        [(message, slot)] = here.migrations.arrived()
        assert (message.request_id, slot) == ("r", None)

    @pytest.mark.parametrize("is_known", [True, False])
    def test_a_request_that_ends_on_the_way(
        self, here: Worker, kv_transfer: m.KvTransfer, is_known: bool
    ) -> None:
        if not is_known:
            here.migrations.peer_down(THERE)
        here.migrations.expect(self.order(kv_transfer), Arrival())
        here.migrations.abort(["another"])
        assert len(here.migrations.wake_fds) == 1
        here.migrations.abort(["r", "r"])
        assert (here.migrations.wake_fds, here.migrations.arrived()) == ([], [])

    def test_memory_that_cannot_be_mapped(
        self, here: Worker, there: Worker, kv_transfer: m.KvTransfer
    ) -> None:
        """Requests from there are computed anew."""
        here.migrations.peer_up(THERE, os.memfd_create("empty"), 0)
        here.migrations.expect(self.order(kv_transfer), there.arrival())
        assert [slot for _, slot in here.migrations.arrived()] == [None]


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
        self.migrations = KvMigrations(
            HERE, self.device, self.host, lambda message, _: self._say(message)
        )

    def _say(self, message: m.Message) -> None:
        self.said.append(message)

    def slots(self, there: Worker, request_id: str) -> list[PeerSlot | None]:
        """With what KV a request arrives that leaves ``there`` now."""
        kv_transfer = there.migrate_out(request_id).kv_transfer
        assert kv_transfer is not None
        there.finish()
        order = m.AddRequest("llama", request_id, 0.0, 1, 8, [b""], [0], kv_transfer=kv_transfer)
        self.migrations.expect(order, there.arrival())
        found = [slot for _, slot in self.migrations.arrived()]
        for slot in found:
            if slot is not None:
                slot.free()
        assert self.said == [m.KvTransferUsed(kv_transfer.transfer_id, THERE)]
        self.said.clear()
        there.migrations.free(kv_transfer.transfer_id)
        return found

    def close(self) -> None:
        self.driver.may_register.set()
        self.migrations.close()
        self.host.close()
        self.device.close()
        assert self.driver.leaks == {}


class TestPeersOfAGpu:
    """Host memory is registered by a thread; until that is done copies pass through buffers."""

    @pytest.fixture
    def gpu(self) -> Iterator[Gpu]:
        made = Gpu()
        yield made
        made.close()

    def know(self, gpu: Gpu, there: Worker) -> None:
        host = there.rig.host
        gpu.migrations.peer_up(THERE, os.dup(host.fd), host.budget_bytes)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < ends_s
            time.sleep(0.001)

    def test_while_its_memory_is_being_registered(self, gpu: Gpu, there: Worker) -> None:
        there.engine.ask("q", 1)
        self.know(gpu, there)  # returns, though the driver does not
        assert [slot is not None for slot in gpu.slots(there, "q")] == [True]
        gpu.driver.may_register.set()
        self.wait_until(lambda: bool(gpu.driver.registrations))

    def test_that_dies_while_its_memory_is_being_registered(self, gpu: Gpu, there: Worker) -> None:
        self.know(gpu, there)
        gpu.migrations.peer_down(THERE)
        self.know(gpu, there)
        gpu.driver.may_register.set()
        self.wait_until(lambda: len(gpu.driver.registrations) == 1)


def test_requests_go_on_in_the_order_in_which_they_came(here: Worker) -> None:
    arrivals = [Arrival() for _ in range(3)]
    tellers = [Arrival(os.dup(one.fd)) for one in arrivals]
    here.know(here, THERE)
    for number, arrival in enumerate(arrivals):
        kv_transfer = m.KvTransfer(f"p{number}", THERE, 1, [(0, 1)], 16)
        order = m.AddRequest("llama", f"r{number}", 0.0, 1, 8, [b""], [0], kv_transfer=kv_transfer)
        here.migrations.expect(order, arrival)
    for number in (2, 0):
        tellers[number].signal(number == 0)
    arrived = here.migrations.arrived()
    assert [message.request_id for message, _ in arrived] == ["r0", "r2"]
    assert [slot is not None for _, slot in arrived] == [True, False]
    here.migrations.abort(["r1"])
    for _, slot in arrived:
        if slot is not None:
            slot.free()
    here.migrations.peer_down(THERE)
    for teller in tellers:
        teller.close()
    assert sorted(str(one) for one in here.said) == [
        str(m.KvTransferUsed(f"p{number}", THERE)) for number in range(3)
    ]
