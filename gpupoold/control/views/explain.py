"""Explanations of a request's place and a model's performance, in words."""

from __future__ import annotations

import time
from collections import Counter

from gpupool_state import ModelRow, RequestRow
from gpupoold.api.request_ids import is_request, request_id_of
from gpupoold.api.schemas_explain import (
    DeviceTurns,
    FinishedWhy,
    ModelOnDevice,
    ModelWhy,
    RequestWhy,
    Why,
)
from gpupoold.control.accounting.model_stats import NUM_MINUTES, Counts, ModelStats
from gpupoold.control.fleet.states import ModelPhase
from gpupoold.control.live_requests import LiveRequest
from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.control.views import bodies as views
from gpupoold.control.views.bodies import span_info
from gpupoold.control.weights.cache import SnapshotCache
from gpupoold.control.workers.worker import Worker, unbound_bytes
from gpupoold.domain import FinishReason, MemoryUse, ModelState, Targets
from gpupoold.errors import NoSuchModel, UsageError
from gpupoold.scheduling.hosting import HostingReason
from gpupoold.scheduling.wait_estimate import (
    Standing,
    first_token_in_s,
    standing_of,
    turns_of,
    why_request,
)
from gpupoold.units import format_bytes, format_duration
from gpupoold.wire.messages import ModelMemory

# Length of the prompt for the estimate of a new request's first token.
_PROMPT_TOKENS = 256
_MAX_EVENTS = 1000
_LOADING = "loading"
_SUSPECT = "suspect"

_STANDINGS = {
    _LOADING: "waits until {model} is in host memory",
    _SUSPECT: "waits to be retried alone: a worker crashed, perhaps because of the request",
    Standing.NO_DEVICE: "waits: no device has {model} now",
    Standing.HELD: "waits: the policy has not chosen a device",
    Standing.KV_ROOM: "waits for KV memory on device {device}",
    Standing.WAITS_FOR_TURN: "waits for the turn of {model} on device {device}",
    Standing.BEHIND_PROMPTS: "waits on device {device} behind other prompts of {model}",
    Standing.PREFILLING: "is on turn on device {device}: the prompt is being processed",
    Standing.PAUSED: "is paused on device {device} until the next turn of {model}",
    Standing.ON_TURN: "is on turn on device {device}",
    Standing.MOVING: "is migrating to device {device} with its KV",
}

# Attainment above which a model needs no advice.
GOOD_ATTAINMENT = 0.99


class Explainer(ModelPart):
    """Answers ``GET /why``. Changes nothing."""

    def __init__(self, parts: ControlParts, cache: SnapshotCache) -> None:
        super().__init__(parts)
        self._state = parts.dispatcher.state
        self._workers = parts.supervisor.workers
        self._cache = cache

    async def why(self, name: str) -> Why:
        """Explain a model, a live request or a finished request.

        An unambiguous part of a request's id suffices. Of several requests of one HTTP request
        the first is explained.

        Raises:
            NoSuchModel: no model or request has this name or id.
            UsageError: several live requests match.
        """
        row = await self._registry.get(name)
        if row is not None:
            return Why(model=self.model(row))
        found = self._live(name)
        if found:
            others = [request.request_id for request in found[1:]]
            return Why(request=self.request(found[0]).model_copy(update={"also_live": others}))
        await self._history.flush()
        ended = await self._history.find_request(request_id_of(name))
        if ended is None:
            raise NoSuchModel(
                f"neither a model nor a request is named {name!r}",
                "see `gpupool list`, and `gpupool history --requests` for finished requests; an "
                "id that a client chose itself is not known, but the answer's x-request-id is",
            )
        return Why(finished=await self._finished(ended))

    def request(self, request: LiveRequest) -> RequestWhy:
        now_s, state = time.monotonic(), self._state
        known = state.requests.get(request.request_id)
        why = None if known is None else why_request(state, known, now_s)
        number = None if why is None else why.device
        rule = None if why is None else why.rule
        standing = _unscheduled(request) if why is None else why.standing.value
        return RequestWhy(
            request_id=request.request_id,
            model=request.model,
            standing=standing,
            text=self._text(request, standing, number),
            device=number,
            rule=None if rule is None else rule.value,
            why=None if rule is None else rule.why,
            num_before=0 if why is None else why.num_before,
            **views.progress(request, now_s),
            next_token_in_s=None if why is None else why.next_token_in_s,
            late_s=request.late_s,
            turns=None if number is None else self._turns(number, now_s),
        )

    def model(self, row: ModelRow) -> ModelWhy:
        """Explain a model, now and over the last hour."""
        name, now_s, targets = row.spec.name, time.monotonic(), row.spec.targets
        stats = self._dispatcher.accounts.stats.get(name, ModelStats())
        hour = stats.last_hour()
        devices = self._devices_of(name, now_s)
        known = self._state.models.get(name)
        first_s = first_token_in_s(self._state, known, _PROMPT_TOKENS, now_s) if known else None
        span_s = NUM_MINUTES * 60.0
        paced_p50_s, paced_p99_s = stats.paced.p50_and_p99()
        return ModelWhy(
            name=name,
            state=self._fleet.availability(name).state.value,
            text=self._model_text(row) + self._wait_text(row.spec.name),
            ttft_s=targets.ttft_s,
            tbt_s=targets.tbt_s,
            attainment_1m=stats.attainment_1m(now_s),
            hour=span_info(time.time() - span_s, span_s, hour),
            cached_bytes=self._cache.num_bytes(name),
            weight_bytes=row.weight_bytes,
            standings=dict(self._standings(name)),
            devices=devices,
            prompt_tokens=_PROMPT_TOKENS,
            first_token_in_s=first_s,
            paced_gap_p50_s=paced_p50_s,
            paced_gap_p99_s=paced_p99_s,
            main_cause=main_cause(hour),
            advice=advice(name, targets, hour),
            unbound_bytes=unbound_bytes(name, self._workers),
        )

    def _live(self, seen: str) -> list[LiveRequest]:
        """Return the live requests of a client's request, the named one first."""
        live, text = self._dispatcher.live.all(), request_id_of(seen)
        named = [request for request in live if is_request(request.request_id, seen)]
        if named:
            return named
        found = [request for request in live if text in request.request_id]
        if len(found) > 1:
            ids = ", ".join(request.request_id for request in found[:5])
            raise UsageError(
                f"{len(found)} live requests have {text!r} in their id", f"for example: {ids}"
            )
        return found

    def _turns(self, number: int, now_s: float) -> DeviceTurns:
        device = self._state.devices[number]
        turns = turns_of(self._dispatcher.shell.core.policy, self._state, device, now_s)
        worker = self._workers[number]
        return DeviceTurns(
            **vars(turns),
            num_waiting_for_kv=device.num_waiting_for_kv,
            loading=views.loading(worker),
            num_gpus=worker.device.num_gpus,
            gpus=worker.device.gpus,
        )

    def _text(self, request: LiveRequest, standing: str, number: int | None) -> str:
        text = _STANDINGS[standing].format(model=request.model, device=number)
        if standing != Standing.PAUSED or number is None:
            return text
        held = _memory_of(self._workers[number], request.model)
        if held is None or not held.kv_host_bytes:
            return f"{text}; the request's KV is on the device"
        return (
            f"{text}; of the KV of {request.model} {format_bytes(held.kv_resident_bytes)} are on "
            f"the device and {format_bytes(held.kv_host_bytes)} in host memory"
        )

    def _standings(self, model: str) -> Counter[str]:
        state = self._state
        standings: Counter[str] = Counter()
        for request in self._dispatcher.live.of_model(model):
            known = state.requests.get(request.request_id)
            if known is None:
                standings[_unscheduled(request)] += 1
            else:
                standings[standing_of(state, known).value] += 1
        return standings

    def _devices_of(self, model: str, now_s: float) -> list[ModelOnDevice]:
        return [
            self._on_device(self._workers[number], model, now_s)
            for number in sorted(self._fleet.availability(model).devices)
            if number in self._state.devices
        ]

    def _on_device(self, worker: Worker, model: str, now_s: float) -> ModelOnDevice:
        held = _memory_of(worker, model)
        live = self._dispatcher.live.of_model(model)
        host = self._fleet.hosts.of(model, worker.number)
        is_fixed = worker.number in self._fleet.fixed_devices(model)
        return ModelOnDevice(
            device=worker.number,
            **vars(MemoryUse.total([held] if held else [])),
            num_requests=sum(request.device == worker.number for request in live),
            turns=self._turns(worker.number, now_s),
            engine_bytes=host.memory.device_bytes,
            why_unshared=host.why_unshared,
            hosting=HostingReason.FIXED.why if is_fixed else host.why,
        )

    def _wait_text(self, name: str) -> str:
        waits_for = self._fleet.availability(name).waits_for
        return f"; waits for {waits_for}" if waits_for else ""

    def _model_text(self, row: ModelRow) -> str:
        name, now = row.spec.name, self._fleet.availability(row.spec.name)
        if now.is_evicted:
            return f"ready, without an engine: the next request {self._next_engine(name)}"
        if now.can_serve:
            if self._dispatcher.live.num_waiting(name):
                return "ready: requests wait until the model is in host memory"
            num_live = self._dispatcher.live.num_of(name)
            return f"ready: {num_live or 'no'} live request{'s' * (num_live != 1)}"
        if now.state is ModelState.FAILED:
            reason = now.reason or "see `gpupool events`"
            return f"failed: {reason}; try `gpupool cache warm {name}`"
        loads = [
            loading
            for loading in map(views.loading, self._workers)
            if loading and loading.model == name
        ]
        if loads:
            return f"loading for {format_duration(loads[0].since_s)}: the worker {loads[0].stage}"
        if now.phase is ModelPhase.LOADING and self._fleet.loaded(name) and not now.devices:
            return "no device has the model now"
        if now.phase is ModelPhase.READY:
            return "accepts no requests: all devices of the model are being drained"
        return f"{now.state.value}: accepts no requests"

    def _next_engine(self, name: str) -> str:
        slots = self._fleet.snapshots.slots(name, self._fleet.hosts.engines())
        if not slots:
            return "loads the model on a device"
        places = (f"{' or '.join(models)} on device {number}" for number, models in slots.items())
        when = "when that is idle, or has been in use for some seconds"
        return f"takes over the engine of {', or of '.join(places)}, {when}"

    async def _finished(self, row: RequestRow) -> FinishedWhy:
        end = row.arrived_at + row.total_s
        last_id = self._history.last_event_id
        events = await self._history.events_after(max(0, last_id - _MAX_EVENTS), _MAX_EVENTS)
        return FinishedWhy(
            request=row,
            device=row.device,
            text=_ended_text(row),
            events=[
                event
                for event in events
                if row.arrived_at - 1 <= event.at <= end + 1
                and (event.subject == row.model or event.kind == "worker_down")
            ],
        )


def _ended_text(row: RequestRow) -> str:
    num_late = row.num_output_tokens - row.num_tokens_in_time
    ended = {
        FinishReason.STOP: "the answer is complete",
        FinishReason.LENGTH: "reached max_tokens or the model's context length",
        FinishReason.ABORT: "the client disconnected or cancelled the request",
        FinishReason.ERROR: f"failed ({row.error})",
    }[FinishReason(row.finish_reason)]
    if not row.num_output_tokens:
        return f"{ended}, after {format_duration(row.total_s)} and without a token"
    late = (
        f"{num_late} of {row.num_output_tokens} tokens were late"
        if num_late
        else (f"all {row.num_output_tokens} tokens were in time")
    )
    return f"{ended}, after {format_duration(row.total_s)}: {late}"


def _unscheduled(request: LiveRequest) -> str:
    """Return the standing of a request unknown to the scheduling core."""
    return _SUSPECT if request.is_held else _LOADING


def _memory_of(worker: Worker, model: str) -> ModelMemory | None:
    models = worker.status.models if worker.status else []
    return next((memory for memory in models if memory.model == model), None)


def main_cause(counts: Counts) -> str | None:
    """Return the cause on which late answers lost the most time, None if all were in time."""
    cause, late_s = max(counts.lateness.by_name().items(), key=lambda late: late[1])
    return cause if late_s > 1e-6 else None


def advice(name: str, targets: Targets, counts: Counts) -> list[str]:
    """Return changes that would bring more of a model's tokens in time."""
    found = []
    if counts.refused:
        found.append(
            f"{counts.refused} requests were refused: more requests may wait if "
            "limits.max_live_requests_per_model and limits.max_live_requests are higher"
        )
    if counts.dropped:
        found.append(f"{counts.dropped} requests were dropped as too late: see limits.drop_late")
    attainment = counts.attainment
    if attainment is not None and attainment < GOOD_ATTAINMENT:
        found += _against(main_cause(counts), name, targets, counts)
    return found


def _against(cause: str | None, name: str, targets: Targets, counts: Counts) -> list[str]:
    match cause:
        case "loading":
            return [
                "the weights had to be read into host memory: raise memory.model_cache, "
                f"or keep the weights in host memory with `gpupool cache pin {name}`"
            ]
        case "queueing":
            return [
                "requests waited for other models' turns: `gpupool plan` shows how many models "
                "this machine serves in time; looser targets or fewer requests of other models, "
                "or another device, give the model more turns",
                "a shorter scheduling.quota_max makes turns more frequent, with more switches",
            ]
        case "switching":
            return [
                "switches to the model took too long: `gpupool switches --slowest` has the "
                "stages; fewer models with work on a device, or smaller weights, leave memory to "
                "prefetch"
            ]
        case "computing":
            tbt_s = counts.tbt.percentile(0.5)
            shown = "" if tbt_s is None else f" (half take more than {format_duration(tbt_s)})"
            return [
                f"the model's steps are slower than the target of "
                f"{format_duration(targets.tbt_s)} between tokens{shown}: set a looser target with "
                f"`gpupool set {name} --tbt`, run fewer requests at a time with "
                "limits.max_live_requests_per_model, or use a faster device"
            ]
    return []
