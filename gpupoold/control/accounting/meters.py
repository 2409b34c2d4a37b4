"""What ``/metrics`` counts, where it happens. Pure bookkeeping, since the daemon's start.

Other parts keep counters of their own, which ``gpupoold.metrics`` reads with these.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from gpupoold.domain import FinishReason
from gpupoold.stats.buckets import Buckets
from gpupoold.wire import messages as m

SwitchKind = Literal["resident", "prefetched", "host_cached", "cold"]
SWITCH_KINDS: tuple[SwitchKind, ...] = ("resident", "prefetched", "host_cached", "cold")
STAGES = ("evict", "map", "weights", "kv")
MOVED_KINDS = ("weights", "weights_prefetched", "kv_in", "kv_out")


@dataclass(slots=True)
class ModelMeter:
    """One model's counts beside those of its :class:`ModelStats`."""

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
    """One device's counts. ``turns`` and ``turn_seconds`` are by model; a turn lasts from when
    its model could run. Each change of the model on turn is one switch, with nothing moved if
    all was there."""

    turns: Counter[str] = field(default_factory=Counter)
    turn_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    switches: Counter[SwitchKind] = field(default_factory=Counter)
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    moved_bytes: Counter[str] = field(default_factory=Counter)
    _model: str | None = None  # of the last turn, or of a switch since
    _cold: set[str] = field(default_factory=set)

    def warmed(self, model: str) -> None:
        """A model's snapshot is in host memory again, from the disk or from its checkpoint."""
        self._cold.add(model)

    def switched(self, switch: m.SwitchRecord) -> SwitchKind:
        """Count a switch; which kind it was."""
        kind = self._kind(switch)
        self._model = switch.model
        self.switches[kind] += 1
        for stage in STAGES:
            self.stage_seconds[stage] += getattr(switch, f"{stage}_s")
        self.moved_bytes["weights"] += switch.weight_bytes
        self.moved_bytes["weights_prefetched"] += switch.prefetched_bytes
        self.moved_bytes["kv_in"] += switch.kv_in_bytes
        self.moved_bytes["kv_out"] += switch.kv_out_bytes
        return kind

    def turn_ended(self, message: m.TurnReport) -> bool:
        """Count a turn; whether its model came without a switch that was told of."""
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
        """Models that are none of these are gone."""
        for counts in (self.turns, self.turn_seconds):
            for model in counts.keys() - models:
                del counts[model]
        self._cold.intersection_update(models)

    def worker_ended(self) -> None:
        """Nothing is on the device any more."""
        self._model = None

    def _kind(self, switch: m.SwitchRecord) -> SwitchKind:
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
        self.switch_seconds: dict[SwitchKind, Buckets] = {kind: Buckets() for kind in SWITCH_KINDS}

    def model(self, name: str) -> ModelMeter:
        """A model's meter, a new one if it has none."""
        meter = self.models.get(name)
        if meter is None:
            meter = self.models[name] = ModelMeter()
        return meter

    def device(self, number: int) -> DeviceMeter:
        """A device's meter, a new one if it has none."""
        return self.devices.setdefault(number, DeviceMeter())

    def arrived(self, message: m.AddRequest, *, is_warm: bool) -> None:
        """A request was taken; ``is_warm``: its model's snapshot is in host memory."""
        meter = self.model(message.model)
        meter.prompt_tokens += message.num_prompt_tokens
        meter.cache_hits += is_warm
        meter.cache_misses += not is_warm

    def refused(self, model: str, reason: str) -> None:
        """A request was not taken."""
        self.model(model).refused[reason] += 1

    def switched(self, switch: m.SwitchRecord) -> None:
        """A device has told of a switch."""
        kind = self.device(switch.device).switched(switch)
        self.switch_seconds[kind].add(switch.total_s)

    def turn_ended(self, number: int, message: m.TurnReport) -> None:
        """A device has told of the end of a turn."""
        if self.device(number).turn_ended(message):
            self.switch_seconds["resident"].add(0.0)

    def warmed(self, model: str, numbers: Iterable[int]) -> None:
        """The model's snapshot had to be read or made again, for these devices."""
        for number in numbers:
            self.device(number).warmed(model)

    def forget_others(self, models: Collection[str]) -> None:
        """Models that are none of these are gone, and are not told of any more."""
        for model in self.models.keys() - models:
            del self.models[model]
        for device in self.devices.values():
            device.forget_others(models)
