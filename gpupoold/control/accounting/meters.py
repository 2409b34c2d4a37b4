"""Counters of ``/metrics``, turns, and the use of the GPUs by model, API key and device.

Other modules have further counters, which ``gpupoold.metrics`` reads too.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple, get_args

from gpupool_state import DeviceMinuteRow, History, UsageRow
from gpupoold.api.schemas import TurnInfo
from gpupoold.control.live_requests import LiveRequest
from gpupoold.domain import SWITCH_STAGES, FinishReason, LargestTransfer, UseCounts, WeightsSource
from gpupoold.stats.histogram import Histogram
from gpupoold.wire import messages as m

WEIGHTS_SOURCES: tuple[WeightsSource, ...] = get_args(WeightsSource)
MOVED_KINDS = ("weights", "weights_prefetched", "weights_late", "kv_in", "kv_out")

_EVENT_EVERY_S = 60.0

_MINUTE_S = 60
_HOUR_S = 3600
# A minute that seems to be longer, or to end before its begin, is a step of the wall clock. Its
# seconds are then counted by the samples, of which there is one each second.
_LONGEST_MINUTE_S = 2 * _MINUTE_S

_NUM_KEPT = 4096


@dataclass(slots=True)
class ModelMeter:
    """A model's counters besides those of its :class:`ModelStats`."""

    finished: Counter[FinishReason] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    resumed: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    quarantines: int = 0
    self_check_failures: int = 0


@dataclass(slots=True)
class DeviceMeter:
    """A device's counters.

    ``turns`` and ``turn_seconds`` are by model; a turn begins when its model can run. Each change
    of the present model counts as one switch, without transfers if all bytes were on the device.
    """

    turns: Counter[str] = field(default_factory=Counter)
    turn_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    switches: Counter[WeightsSource] = field(default_factory=Counter)
    stage_seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(SWITCH_STAGES, 0.0)
    )
    moved_bytes: Counter[str] = field(default_factory=Counter)
    _model: str | None = None  # of the last turn, or of a switch since
    _cold: set[str] = field(default_factory=set)

    @property
    def switching_s(self) -> float:
        """Seconds of all switches."""
        return sum(self.stage_seconds.values())

    def warmed(self, model: str) -> None:
        """Count a model's snapshot restored to host memory, from disk or from the checkpoint."""
        self._cold.add(model)

    def switched(self, switch: m.SwitchRecord) -> WeightsSource:
        """Count a switch; return the place where the weights were."""
        source = self._source(switch)
        self._model = switch.model
        self.switches[source] += 1
        for stage in SWITCH_STAGES:
            self.stage_seconds[stage] += getattr(switch, f"{stage}_s")
        self.moved_bytes["weights"] += switch.weight_bytes
        self.moved_bytes["weights_prefetched"] += switch.prefetched_bytes
        self.moved_bytes["weights_late"] += switch.late_weight_bytes
        self.moved_bytes["kv_in"] += switch.kv_in_bytes
        self.moved_bytes["kv_out"] += switch.kv_out_bytes
        return source

    def turn_ended(self, message: m.TurnReport) -> bool:
        """Count a turn; return whether the model changed without a reported switch."""
        if message.began_s is None:
            return False
        self.turns[message.model] += 1
        self.turn_seconds[message.model] += message.ended_s - message.began_s
        is_silent = message.model != self._model
        if is_silent:
            self._model = message.model
            self.switches["resident"] += 1
        return is_silent

    def forget_others(self, models: Collection[str]) -> None:
        """Drop the counters of all models except ``models``."""
        for counts in (self.turns, self.turn_seconds):
            for model in counts.keys() - models:
                del counts[model]
        self._cold.intersection_update(models)

    def worker_ended(self) -> None:
        """Reset the present model, because the worker has ended."""
        self._model = None

    def _source(self, switch: m.SwitchRecord) -> WeightsSource:
        if switch.model in self._cold:
            self._cold.discard(switch.model)
            return "cold"
        if switch.weight_bytes:
            return "host_cached"
        return "prefetched" if switch.prefetched_bytes else "resident"


class Meters:
    """All models' and all devices' meters, made when first used."""

    def __init__(self) -> None:
        self.models: defaultdict[str, ModelMeter] = defaultdict(ModelMeter)
        self.devices: defaultdict[int, DeviceMeter] = defaultdict(DeviceMeter)
        self.switch_seconds: dict[WeightsSource, Histogram] = {
            source: Histogram() for source in WEIGHTS_SOURCES
        }

    def arrived(self, message: m.AddRequest, *, is_warm: bool) -> None:
        """Count an admitted request; ``is_warm`` if the model's snapshot is in host memory."""
        self.models[message.counted_name].prompt_tokens += message.num_prompt_tokens
        meter = self.models[message.model]
        meter.cache_hits += is_warm
        meter.cache_misses += not is_warm

    def refused(self, model: str, reason: str) -> None:
        """Count a refused request."""
        self.models[model].refused[reason] += 1

    def switched(self, switch: m.SwitchRecord) -> None:
        """Count a device's switch."""
        source = self.devices[switch.device].switched(switch)
        self.switch_seconds[source].add(switch.total_s)

    def turn_ended(self, number: int, message: m.TurnReport) -> None:
        """Count the end of a device's turn."""
        if self.devices[number].turn_ended(message):
            self.switch_seconds["resident"].add(0.0)

    def warmed(self, model: str, numbers: Iterable[int]) -> None:
        """Count a snapshot read or made again, for each of the devices ``numbers``."""
        for number in numbers:
            self.devices[number].warmed(model)

    def forget_others(self, models: Collection[str]) -> None:
        """Drop the meters of all models except ``models``."""
        for model in self.models.keys() - models:
            del self.models[model]
        for device in self.devices.values():
            device.forget_others(models)


class RefusalEvents:
    """Events of refused requests, one per model and minute."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._reported_s: dict[str, float] = {}
        self._unreported: dict[str, tuple[int, str]] = {}

    def note(self, model: str, reason: str, now_s: float, num_requests: int = 1) -> None:
        num, _ = self._unreported.get(model, (0, ""))
        self._unreported[model] = num + num_requests, reason
        self._record((model,), now_s)

    def report(self, now_s: float) -> None:
        """Record held-back events after the end of the minute."""
        self._record(tuple(self._unreported), now_s)

    def _record(self, models: Iterable[str], now_s: float) -> None:
        for model in models:
            reported_s = self._reported_s.get(model)
            if reported_s is not None and now_s - reported_s < _EVENT_EVERY_S:
                continue
            num, reason = self._unreported.pop(model)
            self._reported_s[model] = now_s
            requests = "1 request was refused" if num == 1 else f"{num} requests were refused"
            self._history.record_event("warning", "refused", model, f"{requests}: {reason}")


class UseKey(NamedTuple):
    """A model, preset or adapter, and the public id of an API key, empty without one."""

    model: str
    api_key: str


class DeviceSample(NamedTuple):
    """A device's state at some second; counters since its start, None without a reading."""

    number: int
    num_gpus: int
    switching_s: float
    energy_j: float | None
    kv_host_bytes: int
    kv_host_slab_bytes: int


@dataclass(slots=True)
class _DeviceMinute:
    """The present minute of a device; bytes are sums over ``num_samples``."""

    first: DeviceSample
    last: DeviceSample
    num_samples: int = 0
    kv_host_bytes: int = 0
    kv_host_slab_bytes: int = 0
    energy_j: float | None = None

    def add(self, sample: DeviceSample) -> None:
        if sample.energy_j is not None and self.last.energy_j is not None:
            self.energy_j = (self.energy_j or 0.0) + sample.energy_j - self.last.energy_j
        self.num_samples += 1
        self.kv_host_bytes += sample.kv_host_bytes
        self.kv_host_slab_bytes += sample.kv_host_slab_bytes
        self.last = sample


class UsageMeter:
    """Counts use since the daemon's start, and stores the counts of hours and minutes.

    The time between two outputs of a device belongs to the requests of the second output. Of the
    time beyond a decode step, each request gets a share in proportion to its prompt, if the output
    has the request's first token; the rest is divided equally. So the seconds of all requests add
    up to the seconds of all steps. The energy of a minute is divided by the seconds in the minute;
    the energy of switches and of idle time belongs to no request.

    ``now`` returns wall-clock seconds.
    """

    def __init__(self, history: History, now: Callable[[], float] = time.time) -> None:
        self._history = history
        self._now = now
        self._began_at = now()
        self._minute: defaultdict[UseKey, UseCounts] = defaultdict(UseCounts)
        self._closed: defaultdict[UseKey, UseCounts] = defaultdict(UseCounts)  # all minutes before
        self._hour: dict[UseKey, tuple[int, UseCounts]] = {}  # with the ids of the rows
        self._devices: dict[int, _DeviceMinute] = {}
        self._seconds: dict[int, dict[UseKey, float]] = {}  # of the minute, by device
        self._ended_s: dict[int, float] = {}  # the latest output of each device

    def so_far(self) -> dict[UseKey, UseCounts]:
        """Return the use since the daemon's start; the energy is of the minutes that are over."""
        total: defaultdict[UseKey, UseCounts] = defaultdict(UseCounts)
        for uses in (self._closed, self._minute):
            for key, use in uses.items():
                total[key].add(use)
        return dict(total)

    def stepped(
        self,
        number: int,
        requests: Collection[LiveRequest],
        since_s: float,
        at_s: float,
        decode_s: float,
    ) -> None:
        """Divide the time of a device's output at ``at_s`` among ``requests``.

        The device computed since ``since_s`` or its previous output, the later of the two, but not
        before a request arrived. ``decode_s``: the time of a decode step with these requests. To be
        called before the tokens are counted.
        """
        if not requests:
            return
        arrived_s = min(request.arrival_s for request in requests)
        began_s = max(since_s, self._ended_s.get(number, -math.inf), arrived_s)
        self._ended_s[number] = at_s
        seconds = self._seconds.setdefault(number, defaultdict(float))
        num_gpus = self._devices[number].last.num_gpus if number in self._devices else 1
        for request, share_s in _shares(requests, max(at_s - began_s, 0.0), decode_s):
            key = UseKey(request.counted_name, request.key_id)
            seconds[key] += share_s * num_gpus
            self._minute[key].gpu_s += share_s * num_gpus

    def ended(self, request: LiveRequest) -> None:
        """Count a request that has ended, with its tokens."""
        use = self._minute[UseKey(request.counted_name, request.key_id)]
        use.num_requests += 1
        use.num_prompt_tokens += request.num_prompt_tokens
        use.num_output_tokens += len(request.output_token_ids)

    def sample(self, devices: Iterable[DeviceSample]) -> None:
        """Record the devices' present state; end the minute if due. To be called every second."""
        for device in devices:
            self._devices.setdefault(device.number, _DeviceMinute(device, device)).add(device)
        if self._now() // _MINUTE_S != self._began_at // _MINUTE_S:
            self.close()

    def close(self, least_s: float = 0.0) -> None:
        """Store the present counts, unless they are of less than ``least_s`` seconds."""
        now_at = self._now()
        elapsed_s = now_at - self._began_at
        if 0 <= elapsed_s < least_s:
            return
        is_step = not 0 <= elapsed_s < _LONGEST_MINUTE_S
        for number, minute in self._devices.items():
            seconds = float(minute.num_samples) if is_step else elapsed_s
            self._end_device(number, minute, max(seconds, 1e-3))
        hour_at = int(self._began_at // _HOUR_S) * _HOUR_S
        for key, use in self._minute.items():
            self._closed[key].add(use)
            row_id, hour = self._hour.get(key, (None, UseCounts()))
            hour.add(use)
            row = UsageRow(hour_at=hour_at, **key._asdict(), **vars(hour))
            self._hour[key] = self._history.record_usage(row, row_id), hour
        self._minute.clear()
        self._seconds.clear()
        if now_at // _HOUR_S != self._began_at // _HOUR_S:
            self._hour.clear()
        self._began_at = now_at

    def _end_device(self, number: int, minute: _DeviceMinute, seconds: float) -> None:
        first, last = minute.first, minute.last
        by_key: dict[UseKey, float] = self._seconds.get(number, {})
        gpu_s = sum(by_key.values())
        whole_s = max(seconds * last.num_gpus, gpu_s)
        for key, share_s in by_key.items():
            self._minute[key].energy_j += (minute.energy_j or 0.0) * share_s / whole_s
        num_samples = max(1, minute.num_samples)
        row = DeviceMinuteRow(
            minute_at=int(self._began_at // _MINUTE_S) * _MINUTE_S,
            device=number,
            seconds=seconds,
            computing_s=gpu_s / last.num_gpus,
            switching_s=max(last.switching_s - first.switching_s, 0.0),
            energy_j=minute.energy_j,
            kv_host_bytes=minute.kv_host_bytes // num_samples,
            kv_host_slab_bytes=minute.kv_host_slab_bytes // num_samples,
        )
        if any((gpu_s, row.switching_s, row.energy_j, row.kv_host_slab_bytes)):
            self._history.record_device_minute(row)
        self._devices[number] = _DeviceMinute(last, last)


def _shares(
    requests: Collection[LiveRequest], elapsed_s: float, decode_s: float
) -> Iterator[tuple[LiveRequest, float]]:
    """Yield each request's share of ``elapsed_s``; see the module docstring."""
    firsts = [request for request in requests if not request.token_times_s]
    prompt_tokens = sum(first.num_prompt_tokens for first in firsts)
    num_decoding = len(requests) - len(firsts)
    decoding_s = elapsed_s
    if prompt_tokens:
        decoding_s = min(elapsed_s, decode_s) if num_decoding else 0.0
    for request in requests:
        share_s = decoding_s / len(requests)
        if prompt_tokens and not request.token_times_s:
            share_s += (elapsed_s - decoding_s) * request.num_prompt_tokens / prompt_tokens
        yield request, share_s


def largest_transfer(switch: m.SwitchRecord | None) -> LargestTransfer:
    """Return the largest transfer: weights, else KV, else only page mappings."""
    if switch is None:
        return "none"
    if switch.weight_bytes:
        return "weights"
    return "kv" if switch.kv_in_bytes or switch.kv_out_bytes else "pages"


@dataclass(slots=True)
class _Going:
    """Data of a device since the end of its last turn."""

    switch: m.SwitchRecord | None = None
    model: str = ""
    num_tokens: int = 0


class TurnLog:
    """A bounded ring of turns; the oldest turns are dropped."""

    def __init__(self, num_kept: int = _NUM_KEPT) -> None:
        self.last_id = 0
        self._kept: deque[TurnInfo] = deque(maxlen=num_kept)
        self._going: dict[int, _Going] = {}

    def switched(self, switch: m.SwitchRecord) -> None:
        """Record a switch for the coming turn."""
        going = self._of(switch.device)
        before = going.switch
        if before is not None and before.model == switch.model:
            going.switch = _together(before, switch)
            return
        self._close_unused(switch.device, going)
        going.switch = switch

    def stepped(self, device: int, outputs: m.StepOutputs) -> None:
        """Count the tokens of a step of the present turn."""
        going = self._of(device)
        # A turn that was cancelled ends without a report.
        if going.model != outputs.model:
            going.model, going.num_tokens = outputs.model, 0
        going.num_tokens += sum(item.num_tokens for item in outputs.progress)

    def ended(self, device: int, message: m.TurnReport) -> None:
        """Record the end of a turn; a turn that could not run leaves only its switch."""
        if message.began_s is None:
            return
        going = self._of(device)
        if going.switch is not None and going.switch.model != message.model:
            self._close_unused(device, going)
        num_tokens = going.num_tokens if going.model == message.model else 0
        seconds = max(0.0, message.ended_s - message.began_s)
        self._add(device, message.model, message.began_s, seconds, num_tokens, going.switch)
        self._going[device] = _Going()

    def worker_down(self, device: int) -> None:
        """Drop the present turn of a device whose worker has ended."""
        self._going.pop(device, None)

    def after(self, after_id: int, limit: int) -> list[TurnInfo]:
        """Return the latest ``limit`` turns with larger ids, oldest first."""
        num_new = max(0, min(self.last_id - max(0, after_id), limit))
        # A deque is fast at its ends only.
        newest = list(islice(reversed(self._kept), num_new))
        return newest[::-1]

    def _of(self, device: int) -> _Going:
        return self._going.setdefault(device, _Going())

    def _close_unused(self, device: int, going: _Going) -> None:
        switch, going.switch = going.switch, None
        if switch is not None:
            end_s = switch.at_s + switch.total_s
            self._add(device, switch.model, end_s, 0.0, 0, switch, did_run=False)

    def _add(
        self,
        device: int,
        model: str,
        began_s: float,
        seconds: float,
        num_tokens: int,
        switch: m.SwitchRecord | None,
        *,
        did_run: bool = True,
    ) -> None:
        self.last_id += 1
        self._kept.append(
            TurnInfo(
                id=self.last_id,
                device=device,
                model=model,
                began_at=began_s + time.time() - time.monotonic(),
                seconds=seconds,
                num_tokens=num_tokens,
                switch_kind=largest_transfer(switch),
                switch_s=0.0 if switch is None else switch.total_s,
                did_run=did_run,
            )
        )


def _together(first: m.SwitchRecord, second: m.SwitchRecord) -> m.SwitchRecord:
    """Merge two switches to the same model before the same turn."""
    times = (f"{stage}_s" for stage in ("total", *SWITCH_STAGES))
    sizes = ("weight_bytes", "kv_in_bytes", "kv_out_bytes")
    added = {name: getattr(first, name) + getattr(second, name) for name in (*times, *sizes)}
    return replace(first, late_weight_bytes=second.late_weight_bytes, **added)
