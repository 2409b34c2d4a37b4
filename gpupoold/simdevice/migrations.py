"""Migrations from and to a device without an engine, timed by the size of the KV."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable

from gpupoold.simdevice.answers import Answer
from gpupoold.simdevice.device import PacedDevice
from gpupoold.wire import messages as m
from gpupoold.wire.channel import BlockingChannel


class SimMigrations:
    """The counterpart of :mod:`gpupoold.worker.kv.migrations`, with times instead of bytes."""

    def __init__(
        self, device_number: int, device: PacedDevice, channel: BlockingChannel[m.ToWorker]
    ) -> None:
        self._worker = device_number
        self._device = device
        self._channel = channel
        self._leaving: list[tuple[float, m.Migrated]] = []
        self._coming: list[tuple[float, Answer]] = []
        self._numbers = itertools.count()

    @property
    def next_due_s(self) -> float | None:
        """Time of the next work of ``advance``."""
        return min((at_s for at_s, _ in (*self._leaving, *self._coming)), default=None)

    def migrate_out(self, message: m.MigrateOut, *, is_known: bool) -> None:
        """Let a request leave; report when its KV is in host memory."""
        given = self._device.give_up(message.model, message.request_id) if is_known else None
        if given is None:
            self._channel.send(m.Migrated(message.model, message.request_id, is_known=False))
            return
        answer, ready_s = given
        transfer_id = f"{os.getpid()}-{next(self._numbers)}"
        kv_transfer = m.KvTransfer(transfer_id, self._worker, answer.context_tokens, [])
        has_kv = answer.num_tokens > 0
        moved = m.Migrated(message.model, message.request_id, True, kv_transfer if has_kv else None)
        self._leaving.append((ready_s, moved))

    def attach(self, answer: Answer, kv_transfer: m.KvTransfer | None) -> None:
        """Add a request with its KV, or for a new prefill."""
        if kv_transfer is None:
            self._device.add(answer)
            self._channel.send(m.RequestAttached(answer.model, answer.request_id))
            return
        self._channel.send(m.KvTransferUsed(kv_transfer.transfer_id, kv_transfer.source))
        self._coming.append((self._device.attach(answer), answer))

    def advance(self, now_s: float) -> None:
        """Report departures that are due, and start decoding arrivals."""
        for at_s, moved in list(self._leaving):
            if at_s <= now_s:
                self._leaving.remove((at_s, moved))
                self._tell(moved)
        for at_s, answer in list(self._coming):
            if at_s <= now_s:
                self._coming.remove((at_s, answer))
                self._device.join(answer)
                self._channel.send(m.RequestAttached(answer.model, answer.request_id))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop ended requests on the way here; ignore others."""
        wanted = set(request_ids)
        for at_s, answer in [one for one in self._coming if one[1].request_id in wanted]:
            self._coming.remove((at_s, answer))
            self._device.drop_taken(answer)

    def forget(self, model: str) -> list[str]:
        """Remove a model; return the ids of its requests on the way here."""
        lost = [answer.request_id for _, answer in self._coming if answer.model == model]
        self.abort(lost)
        return lost

    def _tell(self, moved: m.Migrated) -> None:
        if moved.kv_transfer is None:
            self._channel.send(moved)
            return
        fd = os.eventfd(1, os.EFD_CLOEXEC)
        try:
            self._channel.send(moved, (fd,))
        finally:
            os.close(fd)
