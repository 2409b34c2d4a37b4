"""Requests that migrate to another device with their KV, and requests that arrive."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpupoold.memory.contracts import Device
from gpupoold.memory.host import HostSlot, KvHostCache
from gpupoold.memory.kv_transfers import Arrival, PeerCache, PeerSlot
from gpupoold.memory.transfers import DeviceThread, Transfer
from gpupoold.wire import messages as m
from gpupoold.worker.kv.residency import Residency

if TYPE_CHECKING:
    from gpupoold.worker.engine.engine import ModelEngine

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sent:
    slot: HostSlot
    transfer: Transfer
    arrival: Arrival

    def close(self) -> None:
        """Free the slot and the eventfd; no copy to the slot may be running."""
        self.slot.free()
        self.arrival.close()


@dataclass(slots=True)
class _Coming:
    """A request that waits for its KV; ``slot`` is None if the KV will not arrive."""

    message: m.AddRequest
    slot: PeerSlot | None
    arrival: Arrival


@dataclass(eq=False)
class KvMigrations:
    """KV transfers from this worker to other workers, and from other workers to this worker."""

    device_number: int
    device: Device
    host: KvHostCache
    send: Callable[[m.Message, tuple[int, ...]], None]
    _peers: dict[int, PeerCache] = field(default_factory=dict, init=False)
    _sent: dict[str, _Sent] = field(default_factory=dict, init=False)
    _doomed: list[_Sent] = field(default_factory=list, init=False)
    """Not needed, but a copy is running."""
    _coming: dict[str, _Coming] = field(default_factory=dict, init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count, init=False)

    def __post_init__(self) -> None:
        self._thread = DeviceThread(self.device, "peers")

    @property
    def wake_fds(self) -> list[int]:
        """Descriptors that become readable when ``arrived`` has new requests."""
        return [one.arrival.fd for one in self._coming.values()]

    @property
    def sent_bytes(self) -> int:
        """Bytes of host memory in KV transfers that other workers may read."""
        return sum(one.slot.num_bytes for one in (*self._sent.values(), *self._doomed))

    def migrate_out(self, engine: ModelEngine, residency: Residency, request_id: str) -> None:
        """End a request here, start to copy its KV for another device, and send ``Migrated``."""
        computed = engine.computed_kv(request_id)
        if computed is None:
            self.send(m.Migrated(engine.name, request_id, is_known=False), ())
            return
        arrival = Arrival()
        copied = None
        if computed.blocks:
            copied = residency.export(engine.name, computed.blocks, arrival.signal)
        engine.abort([request_id])
        if copied is None:
            arrival.close()
            self.send(m.Migrated(engine.name, request_id), ())
            return
        slot, transfer = copied
        transfer_id = f"{os.getpid()}-{next(self._numbers)}"
        self._sent[transfer_id] = _Sent(slot, transfer, arrival)
        offsets = [(at.offset, at.num_bytes) for at in slot.blocks.extents]
        kv_transfer = m.KvTransfer(
            transfer_id, self.device_number, len(computed.blocks), offsets, computed.num_tokens
        )
        self.send(m.Migrated(engine.name, request_id, kv_transfer=kv_transfer), (arrival.fd,))

    def free(self, transfer_id: str) -> None:
        """Free a KV transfer that no worker reads any more; ignore an unknown id."""
        sent = self._sent.pop(transfer_id, None)
        if sent is not None:
            self._doomed.append(sent)
            self._settle()

    def _settle(self) -> None:
        for sent in [one for one in self._doomed if one.transfer.has_ended]:
            self._doomed.remove(sent)
            sent.close()

    def peer_up(self, device_number: int, fd: int, num_bytes: int) -> None:
        """Map another worker's host cache, replacing the mapping of its previous process."""
        self.peer_down(device_number)
        try:
            self._peers[device_number] = PeerCache(fd, num_bytes, self.device, self._thread)
        except OSError as error:  # the peer's requests recompute KV
            _logger.error("the host cache of worker %d cannot be mapped: %s", device_number, error)

    def peer_down(self, device_number: int) -> None:
        """Handle the death of a worker: KV that has not arrived is lost."""
        for coming in self._coming.values():
            kv_transfer = coming.message.kv_transfer
            if (
                kv_transfer is not None
                and kv_transfer.source == device_number
                and not coming.arrival.is_signalled()
            ):
                coming.arrival.signal(False)
        cache = self._peers.pop(device_number, None)
        if cache is not None:
            cache.leave()

    def expect(self, message: m.AddRequest, arrival: Arrival) -> None:
        """Register a request with a KV transfer in progress; ``arrived`` returns the request later.

        If the sender's host cache is not usable (yet), the request continues at once without KV.
        """
        kv_transfer = message.kv_transfer
        assert kv_transfer is not None
        peer = self._peers.get(kv_transfer.source)
        if peer is None or not peer.is_usable:
            arrival.signal(False)
            self._used(kv_transfer)
            self._coming[message.request_id] = _Coming(message, None, arrival)
            return
        slot = peer.slot(kv_transfer.offsets, lambda: self._used(kv_transfer))
        self._coming[message.request_id] = _Coming(message, slot, arrival)

    def arrived(self) -> list[tuple[m.AddRequest, PeerSlot | None]]:
        """Return requests that can continue, oldest first, each with its KV if all has arrived."""
        if self._doomed:
            self._settle()
        if not self._coming:
            return []
        signalled = [one for one in self._coming.values() if one.arrival.is_signalled()]
        for coming in signalled:
            del self._coming[coming.message.request_id]
            if coming.slot is not None and not coming.arrival.has_arrived():
                coming.slot.free()
                coming.slot = None
            coming.arrival.close()
        return [(coming.message, coming.slot) for coming in signalled]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop the KV of ended requests; ignore unknown requests."""
        for request_id in request_ids:
            coming = self._coming.pop(request_id, None)
            if coming is not None:
                coming.arrival.close()
                if coming.slot is not None:
                    coming.slot.free()

    def close(self) -> None:
        """Unmap the peers' host caches and end the thread."""
        for worker in list(self._peers):
            self.peer_down(worker)
        self._thread.close()

    def _used(self, kv_transfer: m.KvTransfer) -> None:
        self.send(m.KvTransferUsed(kv_transfer.transfer_id, kv_transfer.source), ())
