"""Leads for exposed switches. Pure.

A model whose targets are short is at its ``window`` of lead soon, but the next model's turn with
both switches takes longer. While the next turns can wait, the present model decodes on, until its
lead covers the time without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpupoold.scheduling.policies.planned_turns import (
    LEAST_GAIN_SHARE,
    PlannedTurn,
    Ranked,
    Tuning,
)
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import Batch, DeviceState, Model


def turn_for_lead(ranked: Ranked, device: DeviceState, tuning: Tuning) -> PlannedTurn | None:
    """Return a turn of the present model before the first ranked turn, None if not useful.

    The present model is resident and ahead, but not far enough for the first turn; all turns that
    can be on time still can be after the returned turn. Call this where switches are exposed.
    """
    by_rule = dict(ranked)
    kept = by_rule[Rule.DEADLINE]
    present = next((one for one in by_rule[Rule.AHEAD] if _is_resident(one, device)), None)
    if not kept or present is None:
        return None
    batch, following = device.batches[present.model], device.batches[kept[0].model]
    absence_s = kept[0].duration_s + _return_s(batch.model, following.model, device)
    lacking_s = absence_s - present.due_in_s
    quota_s = min(_decode_s(batch, lacking_s), _slack_s(kept), tuning.turn_max_s)
    if quota_s < tuning.turn_min_s:
        return None
    return present._replace(quota_s=quota_s, duration_s=quota_s, rule=Rule.GATHERS_LEAD)


def _is_resident(planned_turn: PlannedTurn, device: DeviceState) -> bool:
    batch = device.working.get(planned_turn.model)
    return batch is not None and not device.missing(batch.model)


def _return_s(model: Model, other: Model, device: DeviceState) -> float:
    """Return the seconds to copy what ``model`` lacks after a turn of ``other``."""
    short_bytes = device.total_bytes(model) + device.total_bytes(other) - device.capacity_bytes
    return min(max(short_bytes, 0), model.weight_bytes) / device.bandwidth_bytes_per_s


def _decode_s(batch: Batch, more_lead_s: float) -> float:
    """Return the time of decoding for more lead."""
    tbt_s, step_s = batch.model.targets.tbt_s, batch.step_s()
    return more_lead_s / max(tbt_s - step_s, LEAST_GAIN_SHARE * tbt_s) * step_s


def _slack_s(kept: Sequence[PlannedTurn]) -> float:
    """Return the longest delay of the turns, in order, without a late start."""
    slack_s, start_s = float("inf"), 0.0
    for one in kept:
        slack_s = min(slack_s, one.due_in_s - start_s)
        start_s += one.duration_s
    return slack_s
