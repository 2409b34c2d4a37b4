"""A simulated device's memory: weights and KV in bytes, evicted in the same order as by workers.

As on a worker, weights are evicted page by page and only as far as needed, and a prefetch takes
what is free beside the present model. KV for which the host has no memory is dropped and computed
anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gpupoold.scheduling.eviction import Eviction, PageHolding, Victim, plan_evictions
from gpupoold.sim.boxes import SimModel


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


PAGE_BYTES = 8 << 20
"""The default size of a page on CUDA, the unit in which weights are evicted."""
# Smaller pieces are not prefetched, unless a model lacks less.
_LEAST_PIECE_BYTES = 64 << 20
# A worker queues two batches of pages; what is queued still arrives when a prefetch ends.
_QUEUED_BYTES = 2 * 32 * PAGE_BYTES
# As a worker's guess: the part of its KV by which the present model may grow during a turn.
_GROWTH_SHARE = 0.25


@dataclass(slots=True)
class _Held:
    """``weight_bytes`` are on the device or on the way.

    The latest prefetch copies ``copied_bytes`` from ``begun_s`` to ``ready_s``.
    """

    weight_bytes: int = 0
    kv_bytes: int = 0
    kv_host_bytes: int = 0
    last_used_s: float = 0.0
    begun_s: float = 0.0
    ready_s: float = 0.0
    copied_bytes: int = 0
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
        kv_host_bytes: int | None = None,
        recompute: Callable[[str], None] = lambda name: None,
        far_shares: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """``kv_host_bytes`` is the host memory for KV, None for no limit. ``far_shares`` have the
        share of the rate for models whose weights are on another NUMA node.

        ``recompute`` is called with a model whose KV, all of it, has been dropped.
        """
        self.capacity_bytes = capacity_bytes
        self._models = models
        self._use_of = use_of
        self._switch_overhead_s = switch_overhead_s
        self._kv_host_bytes = kv_host_bytes
        self._recompute = recompute
        self._far_shares = far_shares
        self.num_dropped = 0
        """How often the KV of a model was dropped."""
        self._held = {name: _Held() for name in models}
        # Weights without an engine, in free pages: the first left first.
        self._unbound: dict[str, int] = {}
        self._used_bytes = 0
        self._next: str | None = None  # being prefetched
        self._now_s = 0.0  # of the latest switch or prefetch
        self._in_free_s = 0.0
        self._out_free_s = 0.0
        self._given_up_bytes = 0
        self._changed: set[str] = set()
        self.has_evicted = False
        """True once weights or KV of a model have been evicted."""

    @property
    def resident(self) -> frozenset[str]:
        """Models with all weights on the device or on the way."""
        return frozenset(n for n, held in self._held.items() if held.weight_bytes == self._whole(n))

    def missing_bytes(self, name: str) -> int:
        """Bytes to move for a switch to the model now."""
        held = self._held[name]
        return held.kv_host_bytes + self._whole(name) - held.weight_bytes

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
        self._unbound.pop(name, None)
        self._used_bytes -= weight_bytes + kv_bytes
        del self._held[name]
        self._changed.discard(name)
        if self._next == name:
            self._next = None

    def unbind(self, name: str) -> None:
        """Evict a model's weights, which stay in free pages until others need these."""
        num_bytes = self._held[name].weight_bytes
        self.evict_weights(name)
        self._unbound[name] = num_bytes

    def bind(self, name: str) -> None:
        """Map the weights that are still in free pages."""
        num_bytes = self._unbound.pop(name, 0)
        self._held[name].weight_bytes += num_bytes
        self._used_bytes += num_bytes
        self._changed.add(name)

    def _overwrite_unbound(self) -> None:
        """Drop weights without an engine as far as pages are in use for others."""
        short = sum(self._unbound.values()) - max(0, self.free_bytes)
        for name in list(self._unbound):
            if short <= 0:
                return
            gone = min(short, self._unbound[name])
            short -= gone
            self._unbound[name] -= gone

    def evict_weights(self, name: str, num_bytes: int | None = None) -> None:
        """Evict a model's weights, or only pages for ``num_bytes``."""
        held = self._held[name]
        self._unbound.pop(name, None)
        gone = held.weight_bytes
        if num_bytes is not None:
            gone = min(gone, math.ceil(num_bytes / PAGE_BYTES) * PAGE_BYTES)
        if gone:
            self.has_evicted = True
            self._used_bytes -= gone
            held.weight_bytes -= gone
            held.moved.weights = max(0, held.moved.weights - gone)
            held.moved.prefetched = min(held.moved.prefetched, held.moved.weights)
            self._changed.add(name)

    def held_bytes(self, name: str) -> tuple[int, int, int]:
        """Return the bytes of a model's weights and KV on the device, and of KV in host memory."""
        held = self._held[name]
        return held.weight_bytes, held.kv_bytes, held.kv_host_bytes

    def check(self, kv_tokens: Mapping[str, int]) -> None:
        """Raise AssertionError unless the models hold KV for ``kv_tokens`` and all sums match."""
        used_bytes = 0
        for name, num_tokens in kv_tokens.items():
            weight_bytes, kv_bytes, host_bytes = self.held_bytes(name)
            used_bytes += weight_bytes + kv_bytes
            assert kv_bytes + host_bytes == num_tokens * self._models[name].kv_bytes_per_token, (
                f"{name} holds {kv_bytes + host_bytes} bytes of KV for {num_tokens} tokens"
            )
        assert sum(self._unbound.values()) <= max(0, self.free_bytes), "unbound weights in use"
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

    def take_given_up(self) -> int:
        """Return the bytes of prefetches that were not copied after all, since the last call."""
        num_bytes, self._given_up_bytes = self._given_up_bytes, 0
        return num_bytes

    def take_changes(self) -> tuple[tuple[str, int], ...]:
        """Return pairs of model and missing bytes, for each change since the last call."""
        changes = tuple((name, self.missing_bytes(name)) for name in sorted(self._changed))
        self._changed.clear()
        return changes

    def switch_in(self, name: str, now_s: float, *, is_on_turn: bool = False) -> tuple[float, int]:
        """Make a model resident; return the seconds until then, and the moved bytes.

        A prefetch of another model ends, unless the model ``is_on_turn`` already and lacks KV that
        came meanwhile.
        """
        held, model = self._held[name], self._models[name]
        held.last_used_s = self._now_s = now_s
        if not is_on_turn:
            self._give_up_prefetch(name, now_s)
            self._next = None
        missing = self.missing_bytes(name)
        if not missing:
            return max(held.ready_s - now_s, 0.0), 0
        out_bytes = self._free_pages(missing, keep={name})
        out_s = self._copy_out(model, out_bytes, now_s) if out_bytes else now_s
        overhead_s = 0.0 if held.weight_bytes == model.weight_bytes else self._switch_overhead_s
        held.moved.kv_out += out_bytes
        copied = self._take(name, held, missing)
        end_s = self._copy_in(model, copied, max(now_s, out_s), overhead_s)
        return max(end_s, held.ready_s) - now_s, missing + out_bytes

    def prefetch(self, name: str, current: str, now_s: float) -> int:
        """Prefetch a model during the turn of ``current``, or go on; return the bytes to copy.

        Takes what is free beside ``current`` and the growth of its KV: weights first, then KV. Only
        the first call for a model evicts others: as the switch would, or, if both models fit
        together, as far as needed for the whole model.
        """
        held, model = self._held[name], self._models[name]
        self._now_s = now_s
        self._give_up_prefetch(name, now_s)
        missing = self.missing_bytes(name)
        if not missing or name == current:
            return 0
        growth = int(_GROWTH_SHARE * self._held[current].kv_bytes)
        out_s = now_s
        if self._next != name:
            self._next = name
            is_room = self._fit_together(name, current, growth)
            keep, untouched = ({name, current}, None) if is_room else ({name}, current)
            out_bytes = self._free_pages(missing + growth, keep, untouched)
            out_s = self._copy_out(model, out_bytes, now_s) if out_bytes else now_s
        taken = min(missing, self.free_bytes - growth)
        if taken < min(missing, _LEAST_PIECE_BYTES):
            return 0
        is_begun = held.weight_bytes == model.weight_bytes or held.moved.prefetched > 0
        overhead_s = 0.0 if is_begun else self._switch_overhead_s
        copied = self._take(name, held, taken, is_beside=True)
        held.begun_s = max(out_s, self._in_free_s)
        held.ready_s = self._copy_in(model, copied, out_s, overhead_s)
        held.copied_bytes, held.last_used_s = taken, now_s
        return taken

    def _give_up_prefetch(self, wanted: str, now_s: float) -> None:
        """End the prefetch of another model than ``wanted``; copies that wait are not made."""
        name = self._next
        if name is None or name == wanted or (held := self._held[name]).ready_s <= now_s:
            return
        rate_bytes_per_s = held.copied_bytes / (held.ready_s - held.begun_s)
        copied = rate_bytes_per_s * max(0.0, now_s - held.begun_s) + _QUEUED_BYTES
        gone = min(held.copied_bytes - int(copied), held.weight_bytes, held.moved.weights)
        if gone <= 0:
            return
        held.ready_s -= gone / rate_bytes_per_s
        self._in_free_s -= gone / rate_bytes_per_s
        self._given_up_bytes += gone
        held.copied_bytes -= gone
        held.weight_bytes -= gone
        held.moved.weights -= gone
        held.moved.prefetched -= min(gone, held.moved.prefetched)
        self._used_bytes -= gone
        self._changed.add(name)

    def add_kv(self, name: str, num_tokens: int) -> None:
        """Add KV for ``num_tokens`` tokens of a model, or free KV if negative."""
        num_bytes = num_tokens * self._models[name].kv_bytes_per_token
        if num_bytes > 0:
            self._free_pages(num_bytes, keep={name})
        held = self._held[name]
        grown = max(num_bytes, -held.kv_bytes)
        held.kv_bytes += grown
        self._used_bytes += grown
        self._overwrite_unbound()
        if grown > num_bytes:  # the rest of the freed KV is in host memory
            held.kv_host_bytes = max(0, held.kv_host_bytes + num_bytes - grown)
            self._changed.add(name)

    def kv_room_tokens(self, name: str) -> int:
        """Return the tokens whose KV fits beside a model alone; negative if its KV exceeds that."""
        held = self._held[name]
        room_bytes = self.capacity_bytes - self._whole(name) - held.kv_bytes - held.kv_host_bytes
        return room_bytes // max(1, self._models[name].kv_bytes_per_token)

    def has_host_room(self, name: str, num_tokens: int) -> bool:
        """Return whether the host has memory for the KV of ``num_tokens`` tokens."""
        free_bytes = self._host_free_bytes()
        num_bytes = num_tokens * self._models[name].kv_bytes_per_token
        return free_bytes is None or num_bytes <= free_bytes

    def send_kv(self, name: str, num_tokens: int, now_s: float) -> float:
        """Copy a request's KV to host memory and free the device's; return the end of the copy."""
        num_bytes = num_tokens * self._models[name].kv_bytes_per_token
        self.add_kv(name, -num_tokens)
        return self._copy_out(self._models[name], num_bytes, now_s)

    def receive_kv(self, name: str, num_tokens: int) -> None:
        """Add KV of a request in host memory; the model's next switch copies the KV."""
        self._held[name].kv_host_bytes += num_tokens * self._models[name].kv_bytes_per_token
        self._changed.add(name)

    def _fit_together(self, name: str, current: str, growth: int) -> bool:
        """Return whether two models with all KV fit on an empty device."""
        held_bytes = sum(
            self._whole(model) + self._held[model].kv_bytes + self._held[model].kv_host_bytes
            for model in (name, current)
        )
        return held_bytes + growth <= self.capacity_bytes

    def _whole(self, name: str) -> int:
        return self._models[name].weight_bytes

    def _take(self, name: str, held: _Held, num_bytes: int, *, is_beside: bool = False) -> int:
        """Count ``num_bytes`` of a model's missing bytes as copied: weights first, then KV.

        Return the bytes whose copy from this NUMA node takes as long.
        """
        weight_bytes = min(num_bytes, self._whole(name) - held.weight_bytes)
        kv_bytes = num_bytes - weight_bytes
        held.moved.weights += weight_bytes
        held.moved.prefetched += weight_bytes if is_beside else 0
        held.moved.kv_in += kv_bytes
        self._used_bytes += num_bytes
        self._overwrite_unbound()
        held.weight_bytes += weight_bytes
        held.kv_bytes += kv_bytes
        held.kv_host_bytes -= kv_bytes
        self._changed.add(name)
        return kv_bytes + round(weight_bytes / self._far_shares.get(name, 1.0))

    def _copy_in(self, model: SimModel, num_bytes: int, now_s: float, overhead_s: float) -> float:
        start_s = max(now_s, self._in_free_s)
        self._in_free_s = start_s + model.latency.switch_s(num_bytes) + overhead_s
        return self._in_free_s

    def _copy_out(self, model: SimModel, num_bytes: int, now_s: float) -> float:
        start_s = max(now_s, self._out_free_s)
        self._out_free_s = start_s + model.latency.switch_s(num_bytes)
        return self._out_free_s

    def _free_pages(self, num_bytes: int, keep: set[str], untouched: str | None = None) -> int:
        """Evict until ``num_bytes`` are free; return the bytes of KV to copy to the host.

        The plan counts the evictions of ``untouched`` as if made.
        """
        moved = 0
        while (short := num_bytes - self.free_bytes) > 0:
            before = self.free_bytes
            host_bytes = self._host_free_bytes()
            holdings = [
                self._holding(name, host_bytes)
                for name, held in self._held.items()
                if (held.weight_bytes or held.kv_bytes) and name not in keep
            ]
            for eviction in plan_evictions(short, holdings):
                short = num_bytes - self.free_bytes
                if short <= 0:
                    break
                if _is_meant(eviction, untouched):
                    moved += self._evict(eviction, short)
            # A plan is too short only if models counted on the same host memory.
            if host_bytes is None or untouched is not None or self.free_bytes == before:
                break
        return moved

    def _evict(self, eviction: Eviction, short: int) -> int:
        """Evict until ``short`` more bytes are free; return the bytes of KV to copy out."""
        held, host_bytes = self._held[eviction.model], self._host_free_bytes()
        if eviction.victim is Victim.WEIGHTS:
            self.evict_weights(eviction.model, short)
            return 0
        self.has_evicted = True
        if eviction.victim is Victim.RECOMPUTE:
            self._drop_kv(eviction.model)
            return 0
        moved = min(held.kv_bytes, math.ceil(short / PAGE_BYTES) * PAGE_BYTES)
        moved = moved if host_bytes is None else min(moved, host_bytes)
        self._used_bytes -= moved
        held.kv_host_bytes += moved
        held.kv_bytes -= moved
        self._changed.add(eviction.model)
        return moved

    def _drop_kv(self, name: str) -> None:
        held = self._held[name]
        self._used_bytes -= held.kv_bytes
        held.kv_bytes = held.kv_host_bytes = 0
        self.num_dropped += 1
        self._changed.add(name)
        self._recompute(name)

    @property
    def host_free_bytes(self) -> float:
        """Free host memory for KV; infinite without a limit."""
        free_bytes = self._host_free_bytes()
        return math.inf if free_bytes is None else free_bytes

    def _host_free_bytes(self) -> int | None:
        """Return the free host memory for KV; None without a limit."""
        if self._kv_host_bytes is None:
            return None
        return max(0, self._kv_host_bytes - sum(held.kv_host_bytes for held in self._held.values()))

    def _holding(self, name: str, host_bytes: int | None) -> PageHolding:
        held = self._held[name]
        num_live, next_deadline_s = self._use_of(name)
        return PageHolding(
            model=name,
            num_live=num_live,
            idle_s=self._now_s - held.last_used_s,
            ttft_s=self._models[name].targets.ttft_s,
            next_deadline_s=next_deadline_s,
            weight_pages=held.weight_bytes,
            free_kv_pages=0,
            live_kv_pages=held.kv_bytes,
            movable_kv_pages=host_bytes,
        )


def _is_meant(eviction: Eviction, untouched: str | None) -> bool:
    """Return whether to make an eviction; nothing is computed anew for a prefetch."""
    if untouched is None:
        return True
    return eviction.model != untouched and eviction.victim is not Victim.RECOMPUTE
