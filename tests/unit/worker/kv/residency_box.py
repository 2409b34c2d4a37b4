"""Models on a small device with a residency, for tests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from gpupoold.memory.kv import KvMemory
from gpupoold.memory.transfers import TransferQueue
from gpupoold.memory.weights import WeightMemory
from gpupoold.worker.kv.page_eviction import Use
from gpupoold.worker.kv.residency import Residency
from tests.unit.memory.ledger import MemoryLedger
from tests.unit.memory.rig import PAGE, Rig, fill_blocks, geometry_of, read, read_block

WEIGHT_PAGES = 20


@dataclass
class Prefixes:
    """KV that a model's waiting requests could go without."""

    model: Model
    found: list[int] = field(default_factory=list)
    is_short: bool = False
    has_ended: bool = False

    def save(self, queue: TransferQueue) -> None:
        """Nothing has ended."""

    def attach_postponed(self) -> None:
        """Nothing is postponed."""

    def drop(self) -> bool:
        had_any = bool(self.found)
        self.model.ledger.release(self.found)
        self.found = []
        return had_any

    def drop_if_short(self) -> None:
        if self.is_short:
            self.drop()


@dataclass
class Model:
    """A model that wants as many KV blocks as the test says."""

    name: str
    weights: WeightMemory
    kv: KvMemory
    ledger: MemoryLedger
    snapshot: bytes
    num_wanted: int = 0
    prefixes: Prefixes | None = None
    num_soon: int = 0
    requests: list[list[int]] = field(default_factory=list)
    num_preempted: int = 0

    def is_ready(self) -> bool:
        return any(self.kv.is_on_device(request) for request in self.requests)

    def wanted_blocks(self) -> list[int]:
        return [block for request in self.requests for block in request]

    def preempt(self) -> None:
        self.num_preempted += len(self.requests)
        with self.kv.with_reserved_blocks():
            for request in self.requests:
                self.ledger.release(request)
        self.requests.clear()

    def num_missing_blocks(self) -> tuple[int, int]:
        return max(0, self.num_wanted - self.ledger.num_free), self.num_soon


class Box:
    """Three models on a device; a has been used most recently, b least."""

    def __init__(
        self, num_pages: int, host_pages: int = 64, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rig = Rig(num_pages, host_pages)
        self.uses: dict[str, Use] = {}
        self.residency = Residency(
            self.rig.device, self.rig.pool, self.rig.host, 1e9, self.uses.__getitem__, clock=clock
        )
        self.models: dict[str, Model] = {}
        for number, name in enumerate("abc"):
            weights, snapshot = self.rig.weights(WEIGHT_PAGES, name)
            kv, ledger = self.rig.kv(geometry_of("blocks-outermost"))
            self.models[name] = Model(name, weights, kv, ledger, snapshot)
            last_used_s = 9.0 if name == "a" else float(number)
            self.uses[name] = Use(0, last_used_s, 10.0, math.inf)
            self.residency.add(cast(Any, self.models[name]))

    def ask(self, name: str, num_blocks: int) -> dict[int, bytes]:
        """A request of the model on its turn, that has filled so many blocks."""
        model = self.models[name]
        model.num_wanted = num_blocks
        self.residency.ensure_kv(name)
        model.num_wanted = 0
        model.requests.append(model.ledger.allocate(num_blocks))
        self.uses[name] = Use(len(model.requests), 0.0, 10.0, self.uses[name].next_deadline_s)
        return fill_blocks(model.kv, model.requests[-1], (name, len(model.requests)))

    def kv_bytes(self, name: str, written: dict[int, bytes]) -> dict[int, bytes]:
        return {block: read_block(self.models[name].kv, block) for block in written}

    def weights(self, name: str) -> WeightMemory:
        return self.models[name].weights

    def switch_in(self, name: str) -> int:
        """Bytes of weights that the switch itself had to move; the model's bytes are right."""
        stages = self.residency.switch_in(name)
        model = self.models[name]
        assert model.weights.is_resident
        assert read(model.weights.address, len(model.snapshot)) == model.snapshot
        self.residency.check_integrity()
        return stages.weight_bytes // PAGE if stages else 0

    def close(self) -> None:
        self.residency.close()
        self.rig.close()
