"""A worker's status, reported to the daemon several times a second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gpupoold.memory.host import KvHostCache
from gpupoold.wire import messages as m
from gpupoold.worker.kv.residency import Residency
from gpupoold.worker.turns.ledger import RequestLedger
from gpupoold.worker.turns.orders import Orders

if TYPE_CHECKING:
    from gpupoold.worker.engine.engine import ModelEngine


def status(
    device_number: int,
    orders: Orders,
    residency: Residency,
    host: KvHostCache,
    engines: Iterable[ModelEngine],
    ledger: RequestLedger,
    *,
    num_steps: int,
    free_bytes: int,
    now_s: float,
    loading: m.LoadProgress | None,
) -> m.WorkerStatus:
    """Return the worker's status, which also shows the daemon that the worker is alive."""
    turn = orders.turn
    return m.WorkerStatus(
        device=device_number,
        at_s=now_s,
        on_turn=turn.model if turn else None,
        quota_s=turn.quota_s if turn else 0.0,
        num_steps=num_steps,
        free_bytes=free_bytes,
        kv_host_bytes=host.used_bytes - host.prefix_bytes,
        prefix_bytes=host.prefix_bytes,
        kv_host_slab_bytes=host.reserved_bytes,
        models=[_memory_of(engine, ledger) for engine in engines],
        num_recomputed=residency.num_recomputed,
        turn_began_s=orders.began_s,
        prefetched_bytes=residency.prefetched_bytes,
        loading=loading,
    )


class MissingBytes:
    """The bytes that models lack on the device to run, as last reported to the daemon."""

    def __init__(self, residency: Residency, engines: Mapping[str, ModelEngine]) -> None:
        self._residency = residency
        self._engines = engines
        self._reported: dict[str, int] = {}

    def changed(self) -> dict[str, int]:
        """Return each model's missing bytes, if changed since the last call."""
        now = {name: self._residency.missing_bytes(name) for name in self._engines}
        reported, self._reported = self._reported, now
        return {name: missing for name, missing in now.items() if reported.get(name) != missing}


def _memory_of(engine: ModelEngine, ledger: RequestLedger) -> m.ModelMemory:
    weights = engine.weights
    prefixes = engine.prefixes
    return m.ModelMemory(
        model=engine.name,
        weights_resident_bytes=weights.mapped_bytes,
        weights_total_bytes=weights.num_bytes,
        kv_resident_bytes=engine.kv.resident_bytes,
        kv_host_bytes=engine.kv.host_bytes,
        prefix_hit_bytes=0 if prefixes is None else prefixes.hit_bytes,
        prefix_saved_bytes=0 if prefixes is None else prefixes.saved_bytes,
        prefix_peer_bytes=0 if prefixes is None else prefixes.fetched_bytes["peer"],
        prefix_file_bytes=0 if prefixes is None else prefixes.fetched_bytes["file"],
        encoder_bytes=engine.encoder_bytes,
        num_live=ledger.num_live(engine.name),
        num_waiting=ledger.num_waiting(engine.name),
    )
