"""A simulated device's memory: weights and KV in bytes, evicted in the same order as by workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpupoold.scheduling.eviction import PageHolding, Victim, plan_evictions
from gpupoold.sim.model import SimModel


@dataclass(slots=True)
class MovedBytes:
    """The bytes moved for a model since the last switch.

    ``prefetched`` is the part of ``weights`` copied during the turn of another model. ``kv_out`` is
    evicted KV of other models.
    """

    weights: int = 0
    prefetched: int = 0
    kv_in: int = 0
    kv_out: int = 0


@dataclass(slots=True)
class _Held:
    weights: bool = False
    kv_bytes: int = 0
    kv_host_bytes: int = 0
    last_used_s: float = 0.0
    ready_s: float = 0.0  # when a prefetch of the weights ends
    moved: MovedBytes = field(default_factory=MovedBytes)


class SimMemory:
    """Resident models of a device, and the bytes to move for a switch.

    The device has one link per direction, and each link runs one copy at a time: copies of weights
    and KV to the device form one queue, copies to the host another.
    """

    def __init__(
        self,
        capacity_bytes: int,
        models: Mapping[str, SimModel],
        use_of: Callable[[str], tuple[int, float]],
        switch_overhead_s: float = 0.0,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._models = models
        self._use_of = use_of
        self._switch_overhead_s = switch_overhead_s
        self._held = {name: _Held() for name in models}
        self._used_bytes = 0
        self._now_s = 0.0  # of the latest switch or prefetch
        self._in_free_s = 0.0
        self._out_free_s = 0.0
        self._changed: set[str] = set()

    @property
    def resident(self) -> frozenset[str]:
        """Models whose weights are on the device or on the way."""
        return frozenset(name for name, held in self._held.items() if held.weights)

    def missing_bytes(self, name: str) -> int:
        """Bytes to move for a switch to the model now."""
        held = self._held[name]
        return held.kv_host_bytes + (0 if held.weights else self._models[name].weight_bytes)

    @property
    def free_bytes(self) -> int:
        """Free bytes; negative when KV has outgrown the device."""
        return self.capacity_bytes - self._used_bytes

    def add(self, name: str) -> None:
        """Add a model without bytes on the device."""
        self._held[name] = _Held()
        self._changed.add(name)

    def remove(self, name: str) -> None:
        """Remove a model and free its bytes."""
        weight_bytes, kv_bytes, _ = self.held_bytes(name)
        self._used_bytes -= weight_bytes + kv_bytes
        del self._held[name]
        self._changed.discard(name)

    def evict_weights(self, name: str) -> None:
        """Evict a model's weights."""
        held = self._held[name]
        if held.weights:
            self._used_bytes -= self._models[name].weight_bytes
            held.weights, held.ready_s = False, 0.0
            held.moved.weights = held.moved.prefetched = 0
            self._changed.add(name)

    def held_bytes(self, name: str) -> tuple[int, int, int]:
        """Return the bytes of a model's weights and KV on the device, and of KV in host memory."""
        held = self._held[name]
        weight_bytes = self._models[name].weight_bytes if held.weights else 0
        return weight_bytes, held.kv_bytes, held.kv_host_bytes

    def check(self, kv_tokens: Mapping[str, int]) -> None:
        """Raise AssertionError unless the models hold KV for ``kv_tokens`` and all sums match."""
        used_bytes = 0
        for name, num_tokens in kv_tokens.items():
            weight_bytes, kv_bytes, host_bytes = self.held_bytes(name)
            used_bytes += weight_bytes + kv_bytes
            assert kv_bytes + host_bytes == num_tokens * self._models[name].kv_bytes_per_token, (
                f"{name} holds {kv_bytes + host_bytes} bytes of KV for {num_tokens} tokens"
            )
        assert used_bytes == self._used_bytes, (
            f"{used_bytes} bytes held and {self.free_bytes} free of {self.capacity_bytes}"
        )

    @property
    def prefetched_bytes(self) -> int:
        """Bytes of weights prefetched for coming switches, including copies under way."""
        return sum(held.moved.weights for held in self._held.values())

    def take_moved(self, name: str) -> MovedBytes:
        """Return the bytes moved for a model since the last call."""
        held = self._held[name]
        moved, held.moved = held.moved, MovedBytes()
        return moved

    def take_changes(self) -> tuple[tuple[str, int], ...]:
        """Return pairs of model and missing bytes, for each change since the last call."""
        changes = tuple((name, self.missing_bytes(name)) for name in sorted(self._changed))
        self._changed.clear()
        return changes

    def switch_in(self, name: str, now_s: float) -> tuple[float, int]:
        """Make a model resident; return the seconds until then, and the moved bytes."""
        held, model = self._held[name], self._models[name]
        held.last_used_s = self._now_s = now_s
        missing = self.missing_bytes(name)
        if not missing:
            return max(held.ready_s - now_s, 0.0), 0
        out_bytes = self._free_pages(missing, keep={name})
        out_s = self._copy_out(model, out_bytes, now_s) if out_bytes else now_s
        overhead_s = 0.0 if held.weights else self._switch_overhead_s
        held.moved.kv_out += out_bytes
        self._take(name, held, missing)
        end_s = self._copy_in(model, missing, max(now_s, out_s), overhead_s)
        return max(end_s, held.ready_s) - now_s, missing + out_bytes

    def prefetch(self, name: str, current: str, now_s: float) -> int:
        """Prefetch a model during the turn of ``current``; return the bytes to copy.

        Without effect if the device cannot hold both models.
        """
        held, model = self._held[name], self._models[name]
        self._now_s = now_s
        missing = self.missing_bytes(name)
        if not missing or not self._fit_together(name, current):
            return 0
        out_s = now_s
        self._free_pages(missing, keep={name, current}, may_move=False)
        if self.free_bytes < missing:
            out_bytes = self._free_pages(missing, keep={name, current})
            out_s = self._copy_out(model, out_bytes, now_s) if out_bytes else now_s
        if self.free_bytes < missing:
            return 0
        overhead_s = 0.0 if held.weights else self._switch_overhead_s
        self._take(name, held, missing, is_beside=name != current)
        held.ready_s = self._copy_in(model, missing, out_s, overhead_s)
        held.last_used_s = now_s
        return missing

    def add_kv(self, name: str, num_tokens: int) -> None:
        """Add KV for ``num_tokens`` tokens of a model, or free KV if negative."""
        num_bytes = num_tokens * self._models[name].kv_bytes_per_token
        if num_bytes > 0:
            self._free_pages(num_bytes, keep={name})
        held = self._held[name]
        grown = max(num_bytes, -held.kv_bytes)
        held.kv_bytes += grown
        self._used_bytes += grown
        if grown > num_bytes:  # the rest of the freed KV is in host memory
            held.kv_host_bytes = max(0, held.kv_host_bytes + num_bytes - grown)
            self._changed.add(name)

    def send_kv(self, name: str, num_tokens: int, now_s: float) -> float:
        """Copy a request's KV to host memory and free the device's; return the end of the copy."""
        num_bytes = num_tokens * self._models[name].kv_bytes_per_token
        self.add_kv(name, -num_tokens)
        return self._copy_out(self._models[name], num_bytes, now_s)

    def receive_kv(self, name: str, num_tokens: int) -> None:
        """Add KV of a request in host memory; the model's next switch copies the KV."""
        self._held[name].kv_host_bytes += num_tokens * self._models[name].kv_bytes_per_token
        self._changed.add(name)

    def _fit_together(self, name: str, current: str) -> bool:
        """Return whether two models (or one, named twice) with all KV fit on an empty device."""
        together = {one: self._held[one] for one in (name, current)}
        held_bytes = sum(
            self._models[one].weight_bytes + held.kv_bytes + held.kv_host_bytes
            for one, held in together.items()
        )
        return held_bytes <= self.capacity_bytes

    def _take(self, name: str, held: _Held, missing: int, *, is_beside: bool = False) -> None:
        weight_bytes = missing - held.kv_host_bytes
        held.moved.weights += weight_bytes
        held.moved.prefetched += weight_bytes if is_beside else 0
        held.moved.kv_in += held.kv_host_bytes
        self._used_bytes += missing
        held.kv_bytes += held.kv_host_bytes
        held.kv_host_bytes = 0
        held.weights = True
        self._changed.add(name)

    def _copy_in(self, model: SimModel, num_bytes: int, now_s: float, overhead_s: float) -> float:
        start_s = max(now_s, self._in_free_s)
        self._in_free_s = start_s + model.latency.switch_s(num_bytes) + overhead_s
        return self._in_free_s

    def _copy_out(self, model: SimModel, num_bytes: int, now_s: float) -> float:
        start_s = max(now_s, self._out_free_s)
        self._out_free_s = start_s + model.latency.switch_s(num_bytes)
        return self._out_free_s

    def _free_pages(self, num_bytes: int, keep: set[str], *, may_move: bool = True) -> int:
        """Evict until ``num_bytes`` are free; return the bytes of KV to copy to the host."""
        short = num_bytes - self.free_bytes
        if short <= 0:
            return 0
        moved = 0
        holdings = [
            self._holding(name)
            for name, held in self._held.items()
            if (held.weights or held.kv_bytes) and name not in keep
        ]
        for eviction in plan_evictions(short, holdings, may_move=may_move):
            held = self._held[eviction.model]
            if eviction.victim is Victim.WEIGHTS:
                self.evict_weights(eviction.model)
            elif eviction.victim is Victim.LIVE_KV:
                moved += held.kv_bytes
                self._used_bytes -= held.kv_bytes
                held.kv_host_bytes += held.kv_bytes
                held.kv_bytes = 0
            self._changed.add(eviction.model)
        return moved

    def _holding(self, name: str) -> PageHolding:
        held = self._held[name]
        num_live, next_deadline_s = self._use_of(name)
        return PageHolding(
            model=name,
            num_live=num_live,
            idle_s=self._now_s - held.last_used_s,
            ttft_s=self._models[name].targets.ttft_s,
            next_deadline_s=next_deadline_s,
            weight_pages=self._models[name].weight_bytes if held.weights else 0,
            free_kv_pages=0,
            live_kv_pages=held.kv_bytes,
        )
