"""The bodies of ``GET /ps`` and ``GET /top``, cheap enough for a poll every second."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
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


async def ps(control_plane: ControlPlane) -> bytes:
    """Return the running models, devices and requests: ``Ps`` as JSON."""
    rows = await control_plane.registry.list()
    memories, now_s = views.memories_of(control_plane.supervisor.workers), time.monotonic()
    return msgspec.json.encode(
        {
            **_running(control_plane, now_s),
            "models": list(_usages(control_plane, rows, memories, now_s)),
            "switch_seconds": control_plane.dispatcher.accounts.switches.seconds,
        }
    )


async def top(control_plane: ControlPlane, limits: TopLimits) -> bytes:
    """Return the state of the control plane at this moment: ``Top`` as JSON."""
    rows = await control_plane.registry.list()
    turns, history = control_plane.dispatcher.accounts.turns, control_plane.history
    after = limits.events_after
    if after is None or history.last_event_id - after > limits.num_events:
        after = max(0, history.last_event_id - limits.num_events)
    has_news = limits.num_events and history.last_event_id > after
    events = await history.events_after(after, limits.num_events) if has_news else []
    now_s = time.monotonic()
    return msgspec.json.encode(
        {
            **_running(control_plane, now_s, limits.num_requests),
            "at": time.time(),
            "status": views.raw(control_plane.status_of(len(rows))),
            "models": _models(control_plane, rows, now_s, has_minutes=limits.has_minutes),
            "turns": turns.after(limits.turns_after, limits.num_turns),
            "last_turn_id": turns.last_id,
            "events": events,
            "last_event_id": history.last_event_id,
        }
    )


def _running(
    control_plane: ControlPlane, now_s: float, num_requests: int | None = None
) -> views.Values:
    dispatcher = control_plane.dispatcher
    live = islice(dispatcher.live, num_requests)
    return {
        "devices": [views.raw(device) for device in control_plane.devices()],
        "requests": [views.live_request(request, now_s) for request in live],
        "num_switches": dispatcher.accounts.switches.count,
        "switched_bytes": dispatcher.accounts.switches.moved_bytes,
        "additions": [views.raw(info) for info in control_plane.lifecycle.ongoing.infos()],
    }


def _models(
    control_plane: ControlPlane, rows: Iterable[ModelRow], now_s: float, *, has_minutes: bool
) -> list[views.Values]:
    memories = views.memories_of(control_plane.supervisor.workers)
    usages = _usages(control_plane, rows, memories, now_s, has_minutes=has_minutes)
    return [
        {
            "usage": usage,
            "ttft_s": row.spec.targets.ttft_s,
            "tbt_s": row.spec.targets.tbt_s,
            "is_pinned": row.is_pinned,
            "fixed_devices": row.spec.devices,
            "devices": [
                number
                for number, held in memories.get(row.spec.name, ())
                if 0 < held.weights_total_bytes <= held.weights_resident_bytes
            ],
        }
        for row, usage in zip(rows, usages, strict=True)
    ]


def _usages(
    control_plane: ControlPlane,
    rows: Iterable[ModelRow],
    memories: views.Memories,
    now_s: float,
    *,
    has_minutes: bool = True,
) -> Iterator[views.Values]:
    fleet, dispatcher = control_plane.fleet, control_plane.dispatcher
    engines = fleet.hosts.engines()
    for row in rows:
        name, state = row.spec.name, fleet.availability(row.spec.name).state.value
        yield views.usage(
            name,
            state,
            dispatcher,
            control_plane.supervisor.workers,
            memories,
            engines,
            fleet,
            control_plane.cache,
            now_s,
            has_minutes=has_minutes,
        )
