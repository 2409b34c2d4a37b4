"""Counters of ``/metrics`` since the daemon's start. Pure bookkeeping.

Other modules have further counters, which ``gpupoold.metrics`` reads too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import get_args

from gpupool_state import History
from gpupoold.domain import SWITCH_STAGES, FinishReason, WeightsSource
from gpupoold.stats.histogram import Histogram
from gpupoold.wire import messages as m

WEIGHTS_SOURCES: tuple[WeightsSource, ...] = get_args(WeightsSource)
MOVED_KINDS = ("weights", "weights_prefetched", "weights_late", "kv_in", "kv_out")

_EVENT_EVERY_S = 60.0


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
    """All models' and all devices' meters."""

    def __init__(self) -> None:
        self.models: dict[str, ModelMeter] = {}
        self.devices: dict[int, DeviceMeter] = {}
        self.switch_seconds: dict[WeightsSource, Histogram] = {
            source: Histogram() for source in WEIGHTS_SOURCES
        }

    def model(self, name: str) -> ModelMeter:
        """Return a model's meter, creating the meter if needed."""
        meter = self.models.get(name)
        if meter is None:
            meter = self.models[name] = ModelMeter()
        return meter

    def device(self, number: int) -> DeviceMeter:
        """Return a device's meter, creating the meter if needed."""
        return self.devices.setdefault(number, DeviceMeter())

    def arrived(self, message: m.AddRequest, *, is_warm: bool) -> None:
        """Count an admitted request; ``is_warm`` if the model's snapshot is in host memory."""
        self.model(message.counted_name).prompt_tokens += message.num_prompt_tokens
        meter = self.model(message.model)
        meter.cache_hits += is_warm
        meter.cache_misses += not is_warm

    def refused(self, model: str, reason: str) -> None:
        """Count a refused request."""
        self.model(model).refused[reason] += 1

    def switched(self, switch: m.SwitchRecord) -> None:
        """Count a device's switch."""
        source = self.device(switch.device).switched(switch)
        self.switch_seconds[source].add(switch.total_s)

    def turn_ended(self, number: int, message: m.TurnReport) -> None:
        """Count the end of a device's turn."""
        if self.device(number).turn_ended(message):
            self.switch_seconds["resident"].add(0.0)

    def warmed(self, model: str, numbers: Iterable[int]) -> None:
        """Count a snapshot read or made again, for each of the devices ``numbers``."""
        for number in numbers:
            self.device(number).warmed(model)

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
