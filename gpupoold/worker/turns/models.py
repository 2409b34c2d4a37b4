"""The models of a worker: engines that serve, or are kept for another model, and snapshots."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from gpupoold.durations import GraphSizes
from gpupoold.errors import GpupoolError
from gpupoold.memory.device import Device
from gpupoold.memory.host import KvHostCache
from gpupoold.memory.pages import PagePool
from gpupoold.memory.prefix_tiers import PrefixTiers
from gpupoold.memory.weights import Snapshots
from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.wire import messages as m
from gpupoold.worker.engine.engine import ModelEngine
from gpupoold.worker.kv.residency import Residency
from gpupoold.worker.turns.loads import LoadCancelled, LoadEnd, LoadOrder
from gpupoold.worker.turns.requests import RequestLedger
from gpupoold.worker.turns.self_check import SelfChecks
from gpupoold.worker.weights.rank_loads import LoadLinks

# The end of the name of an engine that is built beside the model's present engine.
_NEW = "~new"

KEPT_S = 10.0
"""How long an engine is kept for the model that has asked for its place."""

Send = Callable[[m.FromWorker, tuple[int, ...]], None]
"""Sends a message with descriptors to the daemon."""


@dataclass(frozen=True)
class WorkerDevice:
    """A worker's device with the memory on both sides, as opened and measured at the start.

    ``has_gpu_alone``: no other worker uses the GPU. ``links`` lead to the other ranks of a group.
    """

    number: int
    device: Device
    pool: PagePool
    host: KvHostCache
    prefixes: PrefixTiers | None
    bandwidth_bytes_per_s: float
    has_gpu_alone: bool = True
    links: LoadLinks | None = None


@dataclass(eq=False)
class DeviceModels:
    """The engines that serve, by model, and the accounts of engines that are being loaded.

    ``abort`` ends requests of a model; ``last_used_s`` has the end of each engine's last turn.
    """

    own: WorkerDevice
    engines: dict[str, ModelEngine]
    ledger: RequestLedger
    residency: Residency
    self_checks: SelfChecks
    send: Send
    abort: Callable[[str, list[str]], None]
    last_used_s: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.snapshots = Snapshots(self.own.device)
        self._kept: tuple[ModelEngine, float] | None = None  # and until when

    def begin_load(self, order: LoadOrder, now_s: float) -> str:
        """Prepare the accounts for a load; return the name of the engine."""
        model = order.message.model
        # A loaded model's present engine serves until the new engine has been loaded.
        name = f"{model.name}{_NEW}" if model.name in self.engines else model.name
        # The residency reads both as soon as the model is added.
        self.last_used_s[name] = now_s
        self.ledger.add_model(name, model.targets)
        if self._kept is not None:
            (order.kept, _), self._kept = self._kept, None
        return name

    def end_load(self, order: LoadOrder, end: LoadEnd) -> None:
        """Let a loaded engine serve, and report the end of the load."""
        if isinstance(end, Exception) or order.is_cancelled:
            if not isinstance(end, Exception):
                self.residency.remove(end.engine.name)
                end.engine.close()
                end = LoadCancelled(f"{order.model} was unloaded while being loaded")
            if order.engine_name:
                self.ledger.remove_model(order.engine_name)
            self.send(_failure(order.model, end), ())
            return
        engine, model = end.engine, order.message.model
        graphs = engine.worker.graphs
        dropped = self._replace(engine, model) if order.engine_name != model.name else []
        self.engines[model.name] = engine
        self.self_checks.expect(model.name, end.self_check)
        answer = m.ModelLoaded(
            engine.info,
            engine.layout_digest,
            True,
            end.profile,
            end.self_check,
            end.snapshot_problem,
            dropped,
            engine.memory,
            end.stages,
            end.engine_of,
            _digest(engine),
            end.resident_bytes,
            engine.sharing.why_none,
            GraphSizes() if graphs is None else graphs.sizes,
        )
        self.send(answer, (engine.weights.snapshot.fd,))

    def _replace(self, engine: ModelEngine, model: m.ModelToLoad) -> list[str]:
        """Close the model's present engine, whose place ``engine`` takes.

        Returns the requests that the present engine had.
        """
        dropped = self.ledger.live_requests(model.name)
        self.abort(model.name, dropped)
        self.close(model.name)
        self.residency.remove(engine.name)
        self.ledger.remove_model(engine.name)
        del self.last_used_s[engine.name]
        engine.name = model.name
        self.residency.add(engine)
        self.ledger.add_model(model.name, model.targets)
        return dropped

    def close(self, name: str, kept_until_s: float = 0.0) -> bool:
        """Free the memory of a model without requests, if loaded; return whether its engine stays.

        With a time ``kept_until_s`` the engine stays for the next load, if it can serve another
        model.
        """
        self.snapshots.forget(name)
        engine = self.engines.pop(name, None)
        if engine is None:
            return False
        is_idle = not self.ledger.live_requests(name)
        self.ledger.remove_model(name)
        self.self_checks.forget(name)
        if kept_until_s and is_idle and engine.sharing.family and engine.weights.has_snapshot:
            self.close_kept()
            self.residency.vacate(name)
            self._kept = engine, kept_until_s
            return True
        self.residency.remove(name)
        engine.close()
        return False

    def is_kept_too_long(self, now_s: float) -> bool:
        """Return whether no load has taken over a kept engine in time."""
        return self._kept is not None and self._kept[1] <= now_s

    def close_kept(self) -> None:
        """Close an engine that is kept, if there is one; no step may be under way."""
        if self._kept is not None:
            self._kept[0].close()
            self._kept = None

    def capture_graphs(self) -> None:
        """Capture graphs of a further size for a model on the device, the last that ran first."""
        for name in sorted(self.engines, key=self.last_used_s.__getitem__, reverse=True):
            graphs = self.engines[name].worker.graphs
            if graphs is None or not graphs.sizes.num_left or not self.residency.begin_use(name):
                continue
            with WORKER.main.doing(ThreadPhase.CAPTURE, name):
                graphs.capture_next()
            self.send(m.GraphsCaptured(name, graphs.sizes), ())
            return

    def drop_snapshot(self, model: str) -> None:
        """Evict a model from the device and release its snapshot."""
        engine = self.engines.get(model)
        self.snapshots.drop(model, engine.weights if engine is not None else None)

    def take_snapshot(self, model: str, fd: int) -> None:
        """Attach the snapshot behind ``fd``, which this object owns from now on."""
        engine = self.engines.get(model)
        if engine is None:
            os.close(fd)
            problem = f"{model} is not loaded on worker {self.own.number}"
            self.send(m.SnapshotTaken(model, problem), ())
        else:
            self.snapshots.take(model, engine.weights, fd)


def _digest(engine: ModelEngine) -> str:
    """Return the family of an engine together with its layout, empty without a family."""
    family = engine.sharing.family
    return family and hashlib.sha256(f"{family} {engine.layout_digest}".encode()).hexdigest()


def _failure(name: str, error: Exception) -> m.ModelFailed:
    if isinstance(error, GpupoolError):
        return m.ModelFailed(name, error.code, error.message, error.hint)
    return m.ModelFailed(name, "failed", f"{name}: {error}", "free host memory and try again")
