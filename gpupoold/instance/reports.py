"""What an instance tells of itself: its state a few times a second, and every switch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from gpupoold.instance.residency import SwitchStages
from gpupoold.wire import messages as m

if TYPE_CHECKING:
    from gpupoold.instance.engine import ModelEngine
    from gpupoold.instance.turn_loop import TurnLoop


def status(loop: TurnLoop, now_s: float) -> m.InstanceStatus:
    """Proof of life, and what ``gpupool ps`` shows."""
    turn = loop.orders.turn
    return m.InstanceStatus(
        instance=loop.instance,
        at_s=now_s,
        on_turn=turn.model if turn else None,
        quota_s=turn.quota_s if turn else 0.0,
        num_steps=loop.steps.num_begun,
        free_bytes=loop.residency.pool.num_free * loop.device.page_bytes,
        kv_host_bytes=loop.host.used_bytes,
        models=[_memory_of(loop, engine) for engine in loop.engines.values()],
        num_recomputed=loop.residency.num_recomputed,
        turn_began_s=loop.orders.began_s,
        prefetched_bytes=loop.residency.prefetched_bytes,
    )


def switch_record(
    loop: TurnLoop, name: str, stages: SwitchStages, started_s: float
) -> m.SwitchRecord:
    """A switch to ``name`` that began at ``started_s``."""
    return m.SwitchRecord(
        instance=loop.instance,
        model=name,
        previous=loop.previous,
        at_s=started_s,
        total_s=stages.total_s,
        **dataclasses.asdict(stages),
    )


def _memory_of(loop: TurnLoop, engine: ModelEngine) -> m.ModelMemory:
    weights = engine.weights
    return m.ModelMemory(
        model=engine.name,
        weights_resident_bytes=weights.mapped_bytes,
        weights_total_bytes=weights.num_bytes,
        kv_resident_bytes=engine.kv.resident_bytes,
        kv_host_bytes=engine.kv.host_bytes,
        num_live=loop.ledger.num_live(engine.name),
        num_waiting=loop.ledger.num_waiting(engine.name),
    )
