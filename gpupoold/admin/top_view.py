"""The body of ``GET /top``, cheap enough for a poll every second."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from gpupool_state import ModelRow
from gpupoold.control.views import bodies as views

if TYPE_CHECKING:
    from gpupoold.control.control_plane import ControlPlane


@dataclass(frozen=True, slots=True)
class TopLimits:
    """Limits of the growing lists: turns and events after these ids, and how many."""

    turns_after: int
    events_after: int | None
    num_turns: int
    num_events: int
    num_requests: int
    has_minutes: bool


async def top(control_plane: ControlPlane, limits: TopLimits) -> bytes:
    """Return the state of the control plane at this moment: ``Top`` as JSON."""
    rows = await control_plane.registry.list()
    dispatcher, history = control_plane.dispatcher, control_plane.history
    after = limits.events_after
    if after is None or history.last_event_id - after > limits.num_events:
        after = max(0, history.last_event_id - limits.num_events)
    has_news = limits.num_events and history.last_event_id > after
    events = await history.events_after(after, limits.num_events) if has_news else []
    now_s = time.monotonic()
    live = islice(dispatcher.live, limits.num_requests)
    return msgspec.json.encode(
        {
            "at": time.time(),
            "status": views.raw(control_plane.status_of(len(rows))),
            "devices": [views.raw(one) for one in control_plane.devices()],
            "models": _models(control_plane, rows, now_s, has_minutes=limits.has_minutes),
            "requests": [views.live_request(request, now_s) for request in live],
            "turns": dispatcher.accounts.turns.after(limits.turns_after, limits.num_turns),
            "last_turn_id": dispatcher.accounts.turns.last_id,
            "events": events,
            "last_event_id": history.last_event_id,
            "num_switches": dispatcher.accounts.switches.count,
            "switched_bytes": dispatcher.accounts.switches.moved_bytes,
            "additions": [views.raw(one) for one in control_plane.lifecycle.ongoing.infos()],
        }
    )


def _models(
    control_plane: ControlPlane, rows: Iterable[ModelRow], now_s: float, *, has_minutes: bool
) -> list[views.Values]:
    memories = views.memories_of(control_plane.supervisor.workers)
    engines = control_plane.fleet.hosts.engines()
    found = []
    for row in rows:
        name, targets = row.spec.name, row.spec.targets
        state = control_plane.fleet.availability(name).state.value
        held_by = memories.get(name, ())
        found.append(
            {
                "usage": views.usage(
                    name,
                    state,
                    control_plane.dispatcher,
                    memories,
                    engines,
                    control_plane.cache,
                    now_s,
                    has_minutes=has_minutes,
                ),
                "ttft_s": targets.ttft_s,
                "tbt_s": targets.tbt_s,
                "is_pinned": row.is_pinned,
                "fixed_devices": row.spec.devices,
                "devices": [
                    number
                    for number, held in held_by
                    if 0 < held.weights_total_bytes <= held.weights_resident_bytes
                ],
            }
        )
    return found
