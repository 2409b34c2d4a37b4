"""Bodies of the admin API from the state of the control plane. Pure conversions."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec
from pydantic import BaseModel

from gpupool_state import DeviceMinuteRow, MinuteRow, ModelRow, UsageRow
from gpupoold.api.schemas import DeviceInfo, FrontendInfo, GpuInfo, LoadingInfo, UsageInfo, UseInfo
from gpupoold.api.schemas_access import FleetModel
from gpupoold.api.schemas_explain import ModelSpan, SpanInfo
from gpupoold.control.accounting.model_stats import MINUTE_S, Counts, ModelStats, counts_of
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.fleet.states import Engines
from gpupoold.control.frontends import Frontend
from gpupoold.control.live_requests import LiveRequest, LiveRequests
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.weights.cache import SnapshotCache
from gpupoold.control.workers.worker import Worker, unbound_bytes
from gpupoold.domain import DeviceActivity, DeviceFacts, MainCounts, MemoryUse
from gpupoold.scheduling.observed import RequestClass
from gpupoold.scheduling.policies.planned_turns import Tuning
from gpupoold.scheduling.policies.rebalancing import expected_work
from gpupoold.scheduling.state import Model, State
from gpupoold.scheduling.wait_estimate import first_token_in_s
from gpupoold.system.nvml import NO_READING
from gpupoold.wire.messages import DraftCounts, ModelMemory, WorkerStatus

Memories = Mapping[str, Sequence[tuple[int, ModelMemory]]]
Values = dict[str, Any]
"""Values of a body of the admin API.

Building the body itself takes five times as long, which dominates with hundreds of models and
requests.
"""

# Prompt of the request whose wait is estimated.
_PROMPT_TOKENS = 256
_LEAD_SHARE = Tuning().lead_share

# Maximum number of spans in an answer.
_MAX_SPANS = 60
_SPANS_S = tuple(MINUTE_S * minutes for minutes in (1, 5, 15, 60, 360, 1440))


def frontends(found: Iterable[Frontend], live: LiveRequests) -> list[FrontendInfo]:
    """Return all frontends for ``GET /status``."""
    return [
        FrontendInfo(
            number=frontend.number,
            state="ready"
            if frontend.is_ready
            else "starting"
            if frontend.pid is not None
            else "down",
            pid=frontend.pid,
            num_restarts=frontend.num_restarts,
            num_live_requests=len(live.of_frontend(frontend.number)),
        )
        for frontend in found
    ]


def raw(body: BaseModel) -> msgspec.Raw:
    """Return a body as part of a larger body made of values."""
    return msgspec.Raw(body.model_dump_json().encode())


def devices(
    workers: Sequence[Worker],
    dispatcher: Dispatcher,
    fleet: Fleet,
    limit_of: Callable[[Worker], int | None],
) -> list[DeviceInfo]:
    """Return all devices and their workers as of the latest reports.

    ``limit_of`` returns the limit of a device's engines outside the pages in bytes.
    """
    nums = dispatcher.nums_of_requests(worker.number for worker in workers)
    return [
        _device(worker, dispatcher, fleet, num, limit_of(worker))
        for worker, num in zip(workers, nums, strict=True)
    ]


def _device(
    worker: Worker,
    dispatcher: Dispatcher,
    fleet: Fleet,
    num_requests: int,
    engine_limit_bytes: int | None,
) -> DeviceInfo:
    ready, status, number = worker.ready, worker.status, worker.number
    role, is_role_fixed = dispatcher.roles.of(number)
    quota_s, used_s = _quota(status)
    facts = ready.facts if ready else DeviceFacts()
    activity = status.activity if status else DeviceActivity(free_bytes=_free_of_parked(worker))
    held = status.models if status else []
    engines = fleet.hosts.engines_on(number).values()
    return DeviceInfo(
        device=worker.number,
        kind=worker.device.kind,
        pid=worker.pid,
        state=worker.state,
        **vars(facts),
        **vars(activity),
        quota_s=quota_s,
        num_waiting_for_kv=dispatcher.state.num_waiting_for_kv(worker.number),
        role=role.value,
        is_role_fixed=is_role_fixed,
        is_draining=fleet.is_device_draining(number),
        num_requests=num_requests,
        weights_bytes=sum(model.weights_resident_bytes for model in held),
        kv_bytes=sum(model.kv_resident_bytes for model in held),
        quota_used_s=used_s,
        quota_left_s=None if quota_s is None else max(0.0, quota_s - used_s),
        utilisation=worker.reading.utilisation,
        temperature_c=worker.reading.temperature_c,
        power_w=worker.reading.power_w,
        num_engines=len(engines),
        engine_bytes=fleet.hosts.kept_bytes(number)
        + sum(engine.memory.device_bytes for engine in engines),
        engine_limit_bytes=engine_limit_bytes,
        loading=loading(worker),
        gpus=_gpus(worker),
    )


def _free_of_parked(worker: Worker) -> int:
    """Return all memory of a parked device, 0 for a worker that is down."""
    return worker.ready.facts.device_bytes if worker.ready and worker.state == "parked" else 0


def _gpus(worker: Worker) -> list[GpuInfo]:
    """Return the GPUs of a group; empty for a single GPU."""
    device, ready, status = worker.device, worker.ready, worker.status
    count = device.num_gpus
    if count == 1:
        return []
    readings = worker.reading.gpus or (NO_READING,) * count
    return [
        GpuInfo(
            gpu=gpu,
            memory_bytes=ready.facts.device_bytes // count if ready else 0,
            free_bytes=status.activity.free_bytes // count if status else 0,
            utilisation=reading.utilisation,
            temperature_c=reading.temperature_c,
            power_w=reading.power_w,
            used_bytes=reading.used_bytes,
        )
        for gpu, reading in zip(device.gpus or range(count), readings, strict=True)
    ]


def loading(worker: Worker) -> LoadingInfo | None:
    """Return the present load on a worker, if there is one, as of the latest report."""
    status = worker.status
    if status is None or status.loading is None:
        return None
    load = status.loading
    return LoadingInfo(
        model=load.model,
        stage=load.stage,
        since_s=status.at_s - load.began_s,
        num_waiting=load.num_waiting,
    )


def _quota(status: WorkerStatus | None) -> tuple[float | None, float]:
    """Return the quota and the elapsed time of a turn; the quota is None without an end."""
    if status is None or status.activity.on_turn is None:
        return 0.0, 0.0
    began_s = status.turn_began_s
    used_s = 0.0 if began_s is None else max(0.0, status.at_s - began_s)
    return status.quota_s if math.isfinite(status.quota_s) else None, used_s


def usage(
    name: str,
    state: str,
    dispatcher: Dispatcher,
    workers: Sequence[Worker],
    memories_of: Memories,
    engines_of: Engines,
    fleet: Fleet,
    cache: SnapshotCache,
    now_s: float,
    *,
    has_minutes: bool = True,
) -> Values:
    """Return the values of ``ModelUsage``; attainment by minute only if ``has_minutes``."""
    held = [model for _, model in memories_of.get(name, ())]
    engines = engines_of.get(name, {})
    stats = dispatcher.accounts.stats.get(name) or ModelStats()
    so_far, hour = stats.so_far(), stats.hour_percentiles()
    return {
        "name": name,
        "state": state,
        "num_live": dispatcher.live.num_of(name),
        "num_waiting": dispatcher.live.num_waiting(name) + sum(model.num_waiting for model in held),
        **vars(MemoryUse.total(held)),
        "cached_bytes": cache.num_bytes(name),
        **{field.name: getattr(so_far, field.name) for field in fields(MainCounts)},
        "attainment": so_far.attainment,
        **vars(hour),
        "attainment_1m": stats.attainment_1m(now_s),
        "attainment_1h": stats.hour_attainment(),
        "attainment_minutes": stats.attainment_minutes() if has_minutes else [],
        "tokens_per_s": stats.tokens_per_s(now_s),
        "drafts": _draft_values(stats.drafts),
        "engines": [
            {
                "device": number,
                "load": host.load,
                "graphs": host.graphs,
                "resident_bytes": host.resident_bytes,
                "why_unshared": host.why_unshared,
                **msgspec.structs.asdict(host.memory),
            }
            for number, host in engines.items()
        ],
        "slots": [] if engines else [*fleet.snapshots.slots(name, engines_of)],
        "unbound_bytes": unbound_bytes(name, workers),
    }


def _draft_values(drafts: DraftCounts) -> Values | None:
    """Return the values of ``DraftUsage``, None without drafts."""
    if not drafts.num_drafts:
        return None
    return msgspec.structs.asdict(drafts) | {"acceptance_length": drafts.acceptance_length}


def memories_of(workers: Iterable[Worker]) -> Memories:
    """Return every model's memory with the numbers of its workers."""
    found: defaultdict[str, list[tuple[int, ModelMemory]]] = defaultdict(list)
    for worker in workers:
        for held in worker.status.models if worker.status else ():
            found[held.model].append((worker.number, held))
    return found


def live_request(request: LiveRequest, now_s: float) -> Values:
    """Return the values of ``RequestInfo`` for a live request."""
    return {
        "request_id": request.request_id,
        "model": request.model,
        "device": request.device,
        **progress(request, now_s),
    }


def progress(request: LiveRequest, now_s: float) -> Values:
    """Return the values of ``LiveProgress`` for a live request."""
    return {
        "age_s": now_s - request.arrival_s,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_output_tokens": len(request.token_times_s),
        "next_deadline_in_s": request.next_deadline_s - now_s,
    }


def usage_info(
    since: float,
    uses: Iterable[UsageRow],
    devices: Iterable[DeviceMinuteRow],
    key_names: Mapping[str, str],
) -> UsageInfo:
    """Return the body for sums of the history; ``key_names`` are by the keys' public ids."""
    rows = [dict(vars(use)) for use in uses]
    return UsageInfo(
        since=min((row.pop("hour_at") for row in rows), default=since),
        uses=[UseInfo(**row, key_name=key_names.get(row["api_key"], "")) for row in rows],
        devices=[*devices],
    )


async def fleet_models(
    rows: Iterable[ModelRow], dispatcher: Dispatcher, fleet: Fleet
) -> list[FleetModel]:
    """Return the models of this node, with the waits and the work of their requests.

    Other work of the event loop comes between two models: the fleet asks twice a second.
    """
    state, now_s = dispatcher.state, time.monotonic()
    rates_rps = state.arrivals.lasting.rates_rps(now_s)
    found = []
    for row in rows:
        name, targets = row.spec.name, row.spec.targets
        model = FleetModel(
            name=name,
            names=list(row.spec.names),
            state=fleet.availability(name).state,
            error=row.error,
            weights_bytes=row.weight_bytes,
            num_live=dispatcher.live.num_of(name),
            first_token_in_s=None,
            ttft_s=targets.ttft_s,
            tbt_s=targets.tbt_s,
            pace=row.spec.pace,
            window_s=_LEAD_SHARE * targets.ttft_s,
        )
        known = state.models.get(name)
        if known is not None:
            _add_work(model, state, known, rates_rps.get(name, {}))
            if fleet.is_warm(name):
                model.first_token_in_s = first_token_in_s(state, known, _PROMPT_TOKENS, now_s)
        found.append(model)
        await asyncio.sleep(0)
    return found


def _add_work(
    one: FleetModel, state: State, model: Model, rates_rps: Mapping[RequestClass, float]
) -> None:
    """Add the expected work on the host that needs the least time for it."""
    kinds = {state.devices[number].up.kind for number in model.hosts}
    works = [expected_work(model, rates_rps, model.speed(kind), _LEAD_SHARE) for kind in kinds]
    if works:
        least = min(works, key=lambda work: work.load)
        one.load, one.busy_share, one.kv_bytes = least.load, least.busy_share, least.kv_bytes


def span_s(window_s: float) -> int:
    """Return the shortest usual span that divides a window into at most ``_MAX_SPANS`` parts."""
    return next((span_s for span_s in _SPANS_S if window_s <= span_s * _MAX_SPANS), _SPANS_S[-1])


def span_info(at: float, length_s: float, counts: Counts) -> SpanInfo:
    """Return the body of a span that began ``at``."""
    return SpanInfo(**_values(at, length_s, counts))


def _values(at: float, length_s: float, counts: Counts) -> dict[str, Any]:
    return {
        "at": at,
        "span_s": length_s,
        "attainment": counts.attainment,
        "lateness": counts.lateness,
        "first_token": counts.first_token,
        "between_tokens": counts.between_tokens,
        **counts.counts(),
        **vars(counts.percentiles()),
    }


class Spans:
    """Sums of minutes over spans of one length, aligned to multiples of the length."""

    def __init__(self, length_s: int) -> None:
        self._length_s = length_s
        self._counts: dict[int, Counts] = {}

    def add(self, rows: Iterable[MinuteRow]) -> None:
        """Add minutes; raise ValueError for a malformed row."""
        for row in rows:
            at = row.minute_at // self._length_s * self._length_s
            self._counts.setdefault(at, Counts()).merge(counts_of(row))

    def infos(self) -> list[SpanInfo]:
        """Return the spans with any count, oldest first."""
        return [span_info(at, self._length_s, self._counts[at]) for at in sorted(self._counts)]


class ModelSums:
    """Sums of each model's minutes over a span that began ``at``."""

    def __init__(self, at: float, length_s: float) -> None:
        self._at = at
        self._length_s = length_s
        self._counts: dict[str, Counts] = {}

    def add(self, rows: Iterable[MinuteRow]) -> None:
        """Add minutes; raise ValueError for a malformed row."""
        for row in rows:
            self._counts.setdefault(row.model, Counts()).merge(counts_of(row))

    def infos(self) -> list[ModelSpan]:
        """Return the span of each model with any count, by name."""
        return [
            ModelSpan(model=name, **_values(self._at, self._length_s, self._counts[name]))
            for name in sorted(self._counts)
        ]
