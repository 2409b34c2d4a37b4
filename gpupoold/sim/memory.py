"""A simulated device's memory: weights and KV in bytes, evicted by the daemon's own order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpupoold.scheduling.eviction import Holding, Victim, plan_evictions
from gpupoold.sim.model import SimModel


@dataclass(slots=True)
class _Held:
    weights: bool = False
    kv_bytes: int = 0
    kv_host_bytes: int = 0
    last_used_s: float = 0.0
    ready_s: float = 0.0  # when a prefetch of the weights ends


class SimMemory:
    """Who is resident, and the bytes that a switch must move. One link, used in turn."""

    def __init__(
        self,
        capacity_bytes: int,
        models: Mapping[str, SimModel],
        use_of: Callable[[str], tuple[int, float]],
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._models = models
        self._use_of = use_of
        self._held = {name: _Held() for name in models}
        self._link_free_s = 0.0

    @property
    def resident(self) -> frozenset[str]:
        """Models whose weights are on the device or on their way."""
        return frozenset(name for name, held in self._held.items() if held.weights)

    def missing_bytes(self, name: str) -> int:
        """Bytes to move for a switch to the model now."""
        held = self._held[name]
        return held.kv_host_bytes + (0 if held.weights else self._models[name].weight_bytes)

    def total_bytes(self, name: str) -> int:
        """Bytes of the model in all."""
        held = self._held[name]
        return self._models[name].weight_bytes + held.kv_bytes + held.kv_host_bytes

    def switch_in(self, name: str, now_s: float) -> tuple[float, int]:
        """Make the model resident; seconds until it can run and bytes that move."""
        held, model = self._held[name], self._models[name]
        held.last_used_s = now_s
        missing = self.missing_bytes(name)
        out_bytes = self._make_room(missing, keep={name})
        held.weights = True
        held.kv_bytes += held.kv_host_bytes
        held.kv_host_bytes = 0
        moved = missing + out_bytes
        start_s = max(now_s, self._link_free_s) if moved else now_s
        end_s = start_s + model.latency.switch_s(moved) if moved else now_s
        if moved:
            self._link_free_s = end_s
        return max(end_s, held.ready_s, now_s) - now_s, moved

    def prefetch(self, name: str, current: str, now_s: float) -> bool:
        """Begin to bring a model's weights during another's turn, if room can be made cheaply."""
        held, model = self._held[name], self._models[name]
        if held.weights:
            return False
        if self._free_bytes() < model.weight_bytes:
            self._make_room(model.weight_bytes, keep={name, current}, cheaply=True)
        if self._free_bytes() < model.weight_bytes:
            return False
        start_s = max(now_s, self._link_free_s)
        self._link_free_s = start_s + model.latency.switch_s(model.weight_bytes)
        held.weights, held.ready_s, held.last_used_s = True, self._link_free_s, now_s
        return True

    def add_kv(self, name: str, num_tokens: int) -> None:
        """The model's requests grew (or, negative, ended)."""
        num_bytes = num_tokens * self._models[name].kv_bytes_per_token
        if num_bytes > 0:
            self._make_room(num_bytes, keep={name})
        held = self._held[name]
        held.kv_bytes = max(0, held.kv_bytes + num_bytes)

    def _free_bytes(self) -> int:
        used = sum(
            held.kv_bytes + (self._models[name].weight_bytes if held.weights else 0)
            for name, held in self._held.items()
        )
        return self._capacity_bytes - used

    def _make_room(self, num_bytes: int, keep: set[str], *, cheaply: bool = False) -> int:
        """Evict until ``num_bytes`` are free; returns KV bytes that move to the host."""
        short = num_bytes - self._free_bytes()
        if short <= 0:
            return 0
        moved = 0
        for eviction in plan_evictions(
            short, [self._holding(n) for n in self._held if n not in keep]
        ):
            held = self._held[eviction.model]
            if eviction.victim is Victim.WEIGHTS:
                held.weights, held.ready_s = False, 0.0
            elif eviction.victim is Victim.LIVE_KV and not cheaply:
                moved += held.kv_bytes
                held.kv_host_bytes += held.kv_bytes
                held.kv_bytes = 0
        return moved

    def _holding(self, name: str) -> Holding:
        held = self._held[name]
        num_live, next_deadline_s = self._use_of(name)
        return Holding(
            model=name,
            num_live=num_live,
            last_used_s=held.last_used_s,
            ttft_s=self._models[name].targets.ttft_s,
            next_deadline_s=next_deadline_s,
            weight_pages=self._models[name].weight_bytes if held.weights else 0,
            free_kv_pages=0,
            live_kv_pages=held.kv_bytes,
        )
