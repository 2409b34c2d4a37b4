"""A run of the simulator: the scheduling core over simulated devices, in virtual time."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpupoold.domain import Role
from gpupoold.errors import UsageError
from gpupoold.scheduling import events as e
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.events import Action, ChangeRole, Migrate, Send, StartTurn, costs_of
from gpupoold.scheduling.policies.base import CannotServe, Policy
from gpupoold.sim.boxes import SimModel
from gpupoold.sim.clock import EventPriority, EventQueue
from gpupoold.sim.device import BoxDevice, SimDevice
from gpupoold.sim.host import HostMemory, ModelCache
from gpupoold.sim.hosting import EngineCosts, Hosting
from gpupoold.sim.live import DeviceTally, SimLive
from gpupoold.sim.metrics import RequestResult
from gpupoold.sim.workloads import SimRequest

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SimOutcome:
    """The result of every request, in order of arrival, and each device's counts.

    ``num_reads`` is the number of models read from disk, ``num_dropped`` how often the KV of a
    model was dropped on a device, ``num_preemptions`` how often a request was preempted because
    the KV of the model on its turn outgrew the device, ``num_loads`` the number of engines loaded
    after the start, ``num_bound`` the number taken over within a family.
    """

    results: tuple[RequestResult, ...]
    devices: tuple[DeviceTally, ...]
    end_s: float
    num_reads: int = 0
    num_dropped: int = 0
    num_preemptions: int = 0
    num_loads: int = 0
    num_bound: int = 0


class Simulation:
    """One box under one policy. Equal arguments give equal outcomes."""

    def __init__(
        self,
        models: Mapping[str, SimModel],
        policy: Policy,
        devices: Sequence[BoxDevice],
        *,
        roles: Sequence[Role] | None = None,
        host: HostMemory | None = None,
        engines: EngineCosts | None = None,
        prefix_bytes: int | None = None,
    ) -> None:
        """``host`` has the size of the model cache; None is no limit. ``roles`` fix the devices'
        roles; with None the policy chooses roles at every tick. With ``engines`` None every device
        has all its models' engines. ``prefix_bytes`` limits the KV kept of ended requests of
        conversations, beside what KV of live requests leaves of the devices' ``kv_host_bytes``; 0
        keeps none.

        Raises:
            UsageError: there are no devices, a model exceeds its devices or the model cache, an
                engine exceeds its limit, or the number of roles is wrong.
        """
        devices = [
            device if device.models is not None else replace(device, models=models)
            for device in devices
        ]
        if roles is not None and len(roles) != len(devices):
            raise UsageError(f"{len(roles)} roles for {len(devices)} devices: each needs one")
        # Sorted by name: a tie broken by the order of models must not depend on the caller's order.
        self._models = dict(sorted(models.items()))
        self.core = Core(policy)
        self._queue: EventQueue[Callable[[], None]] = EventQueue()
        self._events: deque[e.Event] = deque()
        self._lives: dict[str, SimLive] = {}
        self._kinds = [device.kind for device in devices]
        self._devices = [
            SimDevice(number, device, self._queue, self._report)
            for number, device in enumerate(devices)
        ]
        _check(self._models, self._devices)
        self._prefixes = None
        if prefix_bytes != 0:
            sizes = {name: model.kv_bytes_per_token for name, model in self._models.items()}
            limit = math.inf if prefix_bytes is None else prefix_bytes
            self._prefixes = SimPrefixes(sizes, lambda: min(limit, self._host_free_bytes()))
        self._cache = None
        if host is not None:
            self._cache = ModelCache(
                host, _snapshot_bytes(self._models, self._kinds, self._devices), self._page_out
            )
        self._uncached: defaultdict[str, list[e.Event]] = defaultdict(list)
        self._hosting, self._has_freed_engine = None, False
        if engines is not None:
            can_run = [device.models for device in self._devices]
            self._hosting = Hosting(engines, tuple(self._models), can_run, self._signs_s)
        self._introduce(
            [
                e.DeviceUp(
                    number,
                    device.num_bytes,
                    _bandwidth(self._devices[number].models),
                    device.prefetches,
                    device.kv_host_bytes,
                    Role.MIXED if roles is None else roles[number],
                    is_role_fixed=roles is not None,
                    kind=device.kind,
                    far_share=device.far_share,
                )
                for number, device in enumerate(devices)
            ],
            [e.FarSnapshots(number, tuple(device.far)) for number, device in enumerate(devices)],
        )

    def run(
        self,
        requests: Sequence[SimRequest],
        end_s: float,
        on_progress: Callable[[float], None] | None = None,
        counted_until_s: float = math.inf,
    ) -> SimOutcome:
        """Serve ``requests`` until ``end_s``; requests unfinished then lack tokens.

        The devices' times of work and of switching are counted until ``counted_until_s``.
        ``on_progress`` gets the virtual time, once every 1000 events. Raises UsageError if a
        request names a model that the box lacks.
        """
        for device in self._devices:
            device.tally.counted_until_s = counted_until_s
        lives = [SimLive(request) for request in requests]
        for live in lives:
            if live.request.model not in self._models:
                raise UsageError(f"the workload asks for {live.request.model}, an unknown model")
            self._arrive_later(live)
        self._tick_later()
        num_handled = 0
        while (at_s := self._queue.next_at_s) is not None and at_s <= end_s:
            due = self._queue.pop()
            assert due is not None
            due.event()
            self._settle()
            num_handled += 1
            if on_progress is not None and num_handled % _PROGRESS_EVERY == 0:
                on_progress(at_s)
        for device in self._devices:
            device.flush(end_s)
        return SimOutcome(
            tuple(self._result(live) for live in lives),
            tuple(device.tally for device in self._devices),
            end_s,
            self._cache.num_reads if self._cache is not None else 0,
            sum(device.memory.num_dropped for device in self._devices),
            sum(device.kv_room.num_preemptions for device in self._devices),
            self._hosting.num_loads if self._hosting is not None else 0,
            self._hosting.num_bound if self._hosting is not None else 0,
        )

    def count_end(self, request_id: str) -> None:
        """Count the end of a request, after which the model may leave host memory and devices."""
        live = self._lives[request_id]
        model = live.request.model
        if self._prefixes is not None:
            self._prefixes.keep(live.request, live.context_tokens)
        if self._hosting is not None:
            self._hosting.ended(model, self._queue.now_s)
            self._has_freed_engine |= self._hosting.has_unhosted
        if self._cache is not None:
            self._cache.ended(model)
            self._read_next()

    def _introduce(self, ups: Sequence[e.DeviceUp], far: Sequence[e.FarSnapshots]) -> None:
        events: list[e.Event] = [model.added() for model in self._models.values()]
        events += ups
        events += [snapshots for snapshots in far if snapshots.models]
        placed = (
            self._hosting.hosts()
            if self._hosting is not None
            else [
                (number, name)
                for number, device in enumerate(self._devices)
                for name in self._models
                if name in device.models
            ]
        )
        events += [self._hosted(number, name) for number, name in placed]
        self.core.handle(events, 0.0)
        try:
            self.core.policy.check(self.core.state)
        except CannotServe as error:
            raise UsageError(f"{self.core.policy.name} refuses: {error}") from error
        self._carry_out(self.core.handle([e.Tick()], 0.0))

    def _arrive_later(self, live: SimLive) -> None:
        self._queue.schedule(
            live.request.arrival_s, lambda: self._arrive(live), priority=EventPriority.ARRIVAL
        )

    def _tick_later(self) -> None:
        """Schedule the next tick, unless no other event is left and no request waits."""
        has_unhosted = self._hosting is not None and self._hosting.has_unhosted
        if self._queue.next_at_s is not None or has_unhosted:
            self._queue.schedule(self._queue.now_s + _TICK_S, self._tick)

    def _tick(self) -> None:
        self._events.append(e.Tick())
        if self._hosting is not None:
            self._events += self._hosting.hostable(self.core.state, self._queue.now_s)
        self._load_engines()
        self._tick_later()

    def _hosted(self, number: int, name: str) -> e.Hosted:
        model, kind = self._devices[number].models[name], self._kinds[number]
        return e.Hosted(number, name, costs_of(model.latency) if kind else None)

    def _load_engines(self, *, needed_only: bool = False) -> None:
        """Begin the loads of engines that are due, or only of models without an engine."""
        if self._hosting is None:
            return
        for load in self._hosting.due(self.core.state, self._queue.now_s, needed_only=needed_only):
            for name in load.evicted:
                self._withdraw(name, self._devices[load.device], keeps_weights=load.is_bound)
            at_s = self._queue.now_s + load.duration_s
            self._queue.schedule(at_s, functools.partial(self._loaded, load.device))

    def _withdraw(self, name: str, device: SimDevice, *, keeps_weights: bool) -> None:
        """Take a model off a device; its requests arrive again, after all tokens so far."""
        for live in device.requests.all(name):
            self._events.append(e.Ended(live.request.id, is_complete=False))
            ready_s = device.release(live)
            if ready_s is not None and self._prefixes is not None:
                self._prefixes.keep_for(live)
            live.num_repeated, live.done_tokens = len(live.token_times_s), 0
            at_s = self._queue.now_s if ready_s is None else ready_s
            self._queue.schedule(at_s, functools.partial(self._events.append, _arrived(live)))
        self._events.append(e.Unhosted(device.number, name))
        (device.unbind if keeps_weights else device.page_out)(name)

    def _loaded(self, device: int) -> None:
        assert self._hosting is not None
        name = self._hosting.loaded(device, self._queue.now_s)
        self._events.append(self._hosted(device, name))
        self._devices[device].bind(name)
        self._load_engines(needed_only=True)

    def _arrive(self, live: SimLive) -> None:
        request = live.request
        self._lives[request.id] = live
        arrived = _arrived(live)
        if self._cache is None or self._cache.arrived(request.model):
            self._events.append(arrived)
        else:
            self._uncached[request.model].append(arrived)
            self._read_next()
        if self._hosting is not None and not self._hosting.arrived(
            request.model, request.arrival_s
        ):
            self._load_engines(needed_only=True)

    def _read_next(self) -> None:
        """Begin to read a model for which requests wait, if possible now."""
        if self._cache is not None and (read := self._cache.next_read()) is not None:
            model, seconds = read
            self._queue.schedule(self._queue.now_s + seconds, lambda: self._was_read(model))

    def _was_read(self, model: str) -> None:
        assert self._cache is not None
        self._cache.was_read()
        self._events += self._uncached.pop(model, ())
        self._read_next()

    def _page_out(self, model: str) -> None:
        """Evict the weights of a model without a snapshot, as workers do."""
        for device in self._devices:
            if model in device.models:
                device.page_out(model)

    def _report(self, event: e.Event) -> None:
        self._events.append(event)
        if isinstance(event, e.Ended):
            self.count_end(event.request_id)

    def _settle(self) -> None:
        """Pass events to the core and actions to the devices until no event is left."""
        while self._events:
            events = tuple(self._events)
            self._events.clear()
            self._carry_out(self.core.handle(events, self._queue.now_s))
            if self._has_freed_engine:
                self._has_freed_engine = False
                self._load_engines(needed_only=True)

    def _signs_s(self, device: int, model: str) -> Iterator[float]:
        """Yield the time of each request's latest token, or else of its arrival."""
        for live in self._devices[device].requests.all(model):
            yield live.token_times_s[-1] if live.token_times_s else live.request.arrival_s

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._send(self._lives[action.request_id], action.device)
                case StartTurn():
                    self._devices[action.device].plan(action.turn, action.then)
                case Migrate():
                    self._migrate(self._lives[action.request_id], action.source, action.target)
                case ChangeRole():
                    pass  # the core's state has the role; a simulated device serves in any role

    def _send(self, live: SimLive, device: int) -> None:
        if self._prefixes is not None and live.num_tokens:
            live.cached_tokens = self._prefixes.find_for(live)
        elif self._prefixes is not None and live.request.conversation:
            live.cached_tokens = self._prefixes.find(live.request)
            self._events.append(e.PromptCached(live.request.id, live.cached_tokens))
        self._devices[device].add(live)

    def _host_free_bytes(self) -> float:
        return sum(device.memory.host_free_bytes for device in self._devices)

    def _migrate(self, live: SimLive, source: int, target: int) -> None:
        ready_s = self._devices[source].release(live)
        if ready_s is None or self._kinds[source] != self._kinds[target]:
            # As in the daemon: groups of different sizes have different parts of the KV.
            now_s, to = self._queue.now_s, self._devices[target]
            self._queue.schedule(now_s, lambda: to.attach_without_kv(live))
        else:
            self._queue.schedule(ready_s, lambda: self._devices[target].attach(live))

    def _result(self, live: SimLive) -> RequestResult:
        targets = self._models[live.request.model].targets
        return RequestResult(live.request, targets, live.token_times_s)


_PROGRESS_EVERY = 1000
_TICK_S = 1.0


def _arrived(live: SimLive) -> e.Arrived:
    request = live.request
    return e.Arrived(
        request.id,
        request.model,
        request.arrival_s,
        request.prompt_tokens,
        request.output_tokens,
        num_tokens=live.num_tokens,
    )


def _snapshot_bytes(
    models: Iterable[str], kinds: Sequence[str], devices: Sequence[SimDevice]
) -> dict[str, int]:
    """Return each model's bytes in the model cache: a snapshot for each kind of device."""
    of_kind = {kind: device.models for kind, device in zip(kinds, devices, strict=True)}
    return {
        name: sum(on[name].weight_bytes for on in of_kind.values() if name in on) for name in models
    }


def _bandwidth(models: Mapping[str, SimModel]) -> float:
    return min(model.latency.switch.bandwidth_bytes_per_s for model in models.values())


def _check(models: Iterable[str], devices: Sequence[SimDevice]) -> None:
    if not devices:
        raise UsageError(f"{len(devices)} devices: at least one is needed")
    for device in devices:
        for model in device.models.values():
            if model.weight_bytes >= device.memory.capacity_bytes:
                raise UsageError(
                    f"{model.name} weighs {model.weight_bytes / 1e9:.3g} GB, "
                    f"a device has {device.memory.capacity_bytes / 1e9:.3g} GB"
                )
    for name in models:
        if not any(name in device.models for device in devices):
            raise UsageError(f"no device can run {name}")


class SimPrefixes:
    """The conversations whose KV is kept, by model and name.

    As on the real box, the copies fill what KV of live requests leaves, the least recently used go
    first, and every device finds them. A conversation stands for its blocks: it is evicted as a
    whole. The KV of requests that wait for an engine is kept besides, until their ends.
    """

    def __init__(
        self, kv_bytes_per_token: Mapping[str, int], budget_bytes: Callable[[], float]
    ) -> None:
        """``budget_bytes`` returns the memory that is left for the copies at the moment."""
        self._bytes_per_token = kv_bytes_per_token
        self._budget_bytes = budget_bytes
        # The tokens by model, and by conversation or id of a request that waits.
        self._kept: OrderedDict[tuple[str, str, str], int] = OrderedDict()
        self.used_bytes = 0
        self.num_hit_tokens = 0

    def find(self, request: SimRequest) -> int:
        """Return the tokens of a prompt whose KV is kept, in whole blocks; never the last token."""
        key = request.model, request.conversation, ""
        kept = self._kept.get(key) if request.conversation else None
        if kept is None:
            return 0
        self._kept.move_to_end(key)
        known = min(kept, request.history_tokens, request.prompt_tokens - 1)
        known -= known % BLOCK_TOKENS
        self.num_hit_tokens += known
        return known

    def find_for(self, live: SimLive) -> int:
        """Return the tokens of a request that had waited whose KV is kept, as ``find``."""
        kept = self._kept.get((live.request.model, "", live.request.id), 0)
        known = min(kept, live.prefill_tokens - 1)
        return known - known % BLOCK_TOKENS

    def keep_for(self, live: SimLive) -> None:
        """Keep the KV of a request that waits for an engine, until its end."""
        self._keep((live.request.model, "", live.request.id), live.context_tokens)

    def keep(self, request: SimRequest, context_tokens: int) -> None:
        """Keep the KV of an ended request; older conversations make room."""
        self._drop((request.model, "", request.id))
        if request.conversation:
            self._keep((request.model, request.conversation, ""), context_tokens)

    def _keep(self, key: tuple[str, str, str], num_tokens: int) -> None:
        self._drop(key)
        self._kept[key] = num_tokens
        self.used_bytes += num_tokens * self._bytes_per_token[key[0]]
        budget_bytes = self._budget_bytes()
        while self._kept and self.used_bytes > budget_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[str, str, str]) -> None:
        tokens = self._kept.pop(key, 0)
        self.used_bytes -= tokens * self._bytes_per_token[key[0]]
