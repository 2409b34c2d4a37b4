"""Loads of models onto a worker's device, beside the turns, one after the other."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from gpupoold.durations import LoadStages
from gpupoold.errors import Failed, GpupoolError
from gpupoold.latency.models import Profile
from gpupoold.memory.device import Device
from gpupoold.memory.group.link import RankLost
from gpupoold.memory.host import KvHostCache
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.prefix_tiers import PrefixTiers
from gpupoold.memory.transfers import DeviceThread
from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.wire.messages import LoadModel, LoadProgress
from gpupoold.worker.device import DriverMemory
from gpupoold.worker.engine.configuration import failure
from gpupoold.worker.engine.engine import ModelEngine, config_of, load_engine
from gpupoold.worker.engine.families import sharing_of
from gpupoold.worker.engine.grammars import EngineGrammars
from gpupoold.worker.engine.vllm_process import make_snapshot
from gpupoold.worker.kv.residency import Residency
from gpupoold.worker.profiling import profile
from gpupoold.worker.threads import HEAP, TurnThread
from gpupoold.worker.turns.self_check import first_self_check, is_same_answer
from gpupoold.worker.weights.loading import (
    ModelLoad,
    WeightSource,
    estimate_slots,
    pages_for_torch,
)
from gpupoold.worker.weights.rank_loads import LeaderLoad, LoadLinks
from gpupoold.worker.weights.reading import HostLoadFails
from gpupoold.worker.weights.stages import LoadStage, StageClock

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class LoadCancelled(Failed):
    """The model was unloaded while being loaded."""


@dataclass(eq=False, slots=True)
class LoadOrder:
    """An order to load; ``snapshot_fd`` is -1 without a snapshot.

    ``kept`` is the engine that an unloaded model has left.
    """

    message: LoadModel
    snapshot_fd: int
    engine_name: str = ""
    began_s: float | None = None
    kept: ModelEngine | None = None
    is_cancelled: bool = False
    on_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def model(self) -> str:
        """The model's name."""
        return self.message.model.name

    def check(self) -> None:
        """Raise LoadCancelled if the load has been cancelled."""
        if self.is_cancelled:
            raise LoadCancelled(f"{self.model} was unloaded while being loaded")

    def take_snapshot(self, num_ranks: int) -> HostBuffer | None:
        """Return the mapped part of rank 0 of the snapshot, if any, owned by the caller."""
        fd, self.snapshot_fd = self.snapshot_fd, -1
        return None if fd < 0 else HostBuffer(fd, os.fstat(fd).st_size // num_ranks)


class Loaded(NamedTuple):
    """A loaded model, its self-check tokens, the problem with its snapshot, profile, and times.

    ``resident_bytes`` of the weights had stayed on the device.
    """

    engine: ModelEngine
    self_check: tuple[int, ...]
    snapshot_problem: str
    profile: Profile | None = None
    stages: LoadStages = LoadStages()
    engine_of: str = ""
    resident_bytes: int = 0


class KeptEngine(NamedTuple):
    """An engine that a load takes over, and the grammars of the load's model."""

    engine: ModelEngine
    grammars: EngineGrammars


LoadEnd = Loaded | GpupoolError | OSError
"""The result of a load, or the reason of its failure."""


@dataclass(eq=False)
class EngineLoader:
    """Loads models onto one device, for one thread.

    ``turns`` is the thread that steps the device's engines. ``current`` returns the model of the
    present turn, if any, whose pages are left alone where possible. ``links`` lead to the other
    ranks of the device's group; ``prefixes`` keeps KV.
    """

    device: Device
    host: KvHostCache
    residency: Residency
    turns: TurnThread
    driver_memory: DriverMemory
    current: Callable[[], str | None] = lambda: None
    links: LoadLinks | None = None
    prefixes: PrefixTiers | None = None
    stages: StageClock = field(default_factory=StageClock, init=False)
    """The stages of the present load."""
    _check: Callable[[], None] = field(default=lambda: None, init=False)
    _resident_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._before = self.driver_memory.outside_pages()

    def load(
        self,
        message: LoadModel,
        snapshot: HostBuffer | None,
        name: str,
        check: Callable[[], None] = lambda: None,
        kept: KeptEngine | None = None,
    ) -> Loaded:
        """Load a model and add its engine as ``name`` to the residency; take ``snapshot`` over.

        The model is bound to the engine ``kept``, if given.

        Everything that steps the engine, or changes pages, runs on the turn thread in slices.

        ``check`` is called often, and may end the load by an error. With a snapshot the checkpoint
        is not read, unless the snapshot has another layout or the model fails its self-check with
        the snapshot.

        Raises:
            GpupoolError: the checkpoint cannot be served here.
            OSError: there is no host memory for a snapshot.
        """
        self._check, self.stages = check, StageClock()
        loaded = self._load(message, snapshot, name, kept)
        engine, budget_s = loaded.engine, message.profiling_budget_s
        run = profile(
            engine,
            self.residency,
            budget_s,
            message.model.path,
            slice_limit_s=self.turns.slice_limit_s,
        )
        try:
            with self.stages.during(LoadStage.PROFILE):
                measured = self._in_slices(run, ThreadPhase.PROFILE, engine)
        except BaseException:
            self._give_up(engine)
            raise
        if not loaded.engine_of:
            engine.memory = self.driver_memory.taken_since(self._before)
            if (graphs := engine.worker.graphs) is not None:
                num_bytes = engine.memory.device_bytes + graphs.reserved_bytes
                engine.memory = msgspec.structs.replace(engine.memory, device_bytes=num_bytes)
        return loaded._replace(
            profile=measured, stages=self.stages.so_far(), resident_bytes=self._resident_bytes
        )

    def grammars_for(self, kept: ModelEngine, message: LoadModel) -> EngineGrammars | None:
        """Return the grammars of a model that can take over a kept engine, None if it cannot."""
        if message.has_snapshot and message.layout_digest != kept.layout_digest:
            return None
        model, device = message.model, self.device
        try:
            config = config_of(model, device)
            if sharing_of(model, config, device) != kept.sharing:
                return None
            return EngineGrammars(config, model.name)
        except Exception as error:  # the load that follows has the same
            _logger.info("%s: %s", model.name, error)
            return None

    def _load(
        self,
        message: LoadModel,
        snapshot: HostBuffer | None,
        name: str,
        kept: KeptEngine | None = None,
    ) -> Loaded:
        if snapshot is None and kept is not None:
            try:
                message, snapshot = self._make_snapshot(kept, message)
            except HostLoadFails:  # the engine is closed
                kept = None
            if kept is not None and message.layout_digest != kept.engine.layout_digest:
                self.turns.call(kept.engine.close)
                kept = None
        if snapshot is None:
            return self._from_checkpoint(message, None, "", name)
        spare = os.dup(snapshot.fd)  # a failed load closes the snapshot
        try:
            engine_of = "" if kept is None else kept.engine.info.name
            if kept is None:
                engine = self._build(message, snapshot, name, skips_checkpoint=True)
            else:
                engine = self._bind(kept, message, snapshot, name)
            self_check = self._try(engine)
            generates = engine.info.generates
            if not message.self_check or is_same_answer(
                message.self_check, self_check, generates=generates
            ):
                os.close(spare)
                return Loaded(engine, self_check, "", engine_of=engine_of)
        except GpupoolError as error:
            problem = f"not loaded from its snapshot: {error.message}"
            _logger.warning("%s: %s", message.model.name, problem)
            again = HostBuffer(spare, snapshot.num_bytes)
            return self._from_checkpoint(message, again, problem, name)
        except BaseException:
            os.close(spare)
            raise
        os.close(spare)
        self._give_up(engine)
        problem = (
            f"with its snapshot the model answers {list(self_check)} "
            f"instead of {list(message.self_check)}"
        )
        _logger.error("%s: %s", message.model.name, problem)
        return self._from_checkpoint(message, None, problem, name)

    def _from_checkpoint(
        self, message: LoadModel, snapshot: HostBuffer | None, problem: str, name: str
    ) -> Loaded:
        engine = self._build(message, snapshot, name, skips_checkpoint=False)
        return Loaded(engine, self._try(engine), problem)

    def _build(
        self,
        message: LoadModel,
        snapshot: HostBuffer | None,
        name: str,
        *,
        skips_checkpoint: bool,
        why_on_device: str = "",
    ) -> ModelEngine:
        load = self._new_load(
            message, snapshot, skips_checkpoint=skips_checkpoint, why_on_device=why_on_device
        )
        self._before = self.driver_memory.outside_pages()
        # A snapshot that could not be used may be of other files than the checkpoint's.
        kv_identity = message.kv_identity if snapshot is None or skips_checkpoint else ""
        try:
            engine = load_engine(message.model, load, self.host, name, self.prefixes, kv_identity)
        except HostLoadFails as error:
            if skips_checkpoint:
                raise
            _logger.warning("%s: %s", message.model.name, error.message)
            reason = error.message
            return self._build(message, None, name, skips_checkpoint=False, why_on_device=reason)
        self.turns.call(self.residency.add, engine)
        return engine

    def _new_load(
        self,
        message: LoadModel,
        snapshot: HostBuffer | None,
        *,
        skips_checkpoint: bool,
        why_on_device: str = "",
    ) -> ModelLoad:
        model = message.model
        try:
            snapshot_bytes = snapshot.num_bytes if snapshot and skips_checkpoint else 0
            num_released = pages_for_torch(model, self.device, snapshot_bytes)
            slot_bytes = estimate_slots(model)
            if not self.device.is_host_addressable:
                self.turns.call(HEAP.collect)  # closed engines may hold torch's memory
        except BaseException:
            if snapshot is not None:
                snapshot.close()
            raise
        new_load: Callable[..., ModelLoad] = ModelLoad
        if self.links is not None:
            new_load = functools.partial(LeaderLoad, links=self.links)
        return new_load(
            model.name,
            self.device,
            self.residency.pool,
            WeightSource(snapshot, message.layout_digest, skips_checkpoint),
            num_released,
            estimated_slot_bytes=slot_bytes,
            why_on_device=why_on_device,
            make_room=self.residency.free_pages,
            turns=self.turns,
            stages=self.stages,
        )

    def _make_snapshot(self, kept: KeptEngine, message: LoadModel) -> tuple[LoadModel, HostBuffer]:
        """Read a model that takes over an engine, which is closed after an error.

        Returns the order with the layout's digest, and the snapshot.
        """
        try:
            load = self._new_load(message, None, skips_checkpoint=False)
            snapshot = make_snapshot(message.model.name, load, kept.grammars.vllm_config)
        except BaseException:
            self.turns.call(kept.engine.close)
            raise
        assert load.layout is not None
        digest = load.layout.digest
        return msgspec.structs.replace(message, layout_digest=digest), snapshot

    def _bind(
        self, kept: KeptEngine, message: LoadModel, snapshot: HostBuffer, name: str
    ) -> ModelEngine:
        """Let an engine of the family serve the model."""
        engine, grammars = kept
        self.device.pin_later(snapshot.address, snapshot.num_bytes)
        former: HostBuffer = self.turns.call(
            engine.bind,
            message.model.name,
            name,
            snapshot,
            grammars,
            self.prefixes,
            message.kv_identity,
        )
        self.turns.call(self.residency.add, engine)
        self.device.unpin_later(former.address, former.num_bytes, former.close)
        return engine

    def _try(self, engine: ModelEngine) -> tuple[int, ...]:
        """Run the self-check; unload the model if the self-check fails with an error."""
        try:
            with self.stages.during(LoadStage.CHECK):
                return self._in_slices(self._checked(engine), ThreadPhase.SELF_CHECK, engine)
        except Exception as error:
            self._give_up(engine)
            if isinstance(error, GpupoolError):
                raise
            raise failure(engine.info.name, "in its self-check", error) from error

    def _checked(self, engine: ModelEngine) -> Generator[None, None, tuple[int, ...]]:
        """Bring the weights onto the device beside the turns, then run the self-check."""
        while self.residency.bind_piece(engine.name):
            yield
        self._resident_bytes = engine.weights.mapped_bytes
        while self.residency.load_piece(engine.name, self.current()):
            yield
        self_check = yield from first_self_check(engine, self.residency, self.device)
        engine.kv.unmap(engine.kv.index.idle())
        return self_check

    def _in_slices(
        self, slices: Generator[None, None, _T], phase: ThreadPhase, engine: ModelEngine
    ) -> _T:
        def checked() -> Generator[None, None, _T]:
            while True:
                self._check()
                try:
                    next(slices)
                except StopIteration as end:
                    result: _T = end.value
                    return result
                yield

        return self.turns.run_slices(checked(), phase, engine.info.name)

    def _give_up(self, engine: ModelEngine) -> None:
        self.turns.call(self._close, engine)

    def _close(self, engine: ModelEngine) -> None:
        self.residency.remove(engine.name)
        engine.close()


@dataclass(eq=False)
class LoadQueue:
    """The orders to load, in order of arrival; the turn thread calls all methods.

    ``begin`` prepares a load and returns the name of the engine; ``end`` takes the result. Both run
    on the turn thread between two steps.
    """

    loader: EngineLoader
    begin: Callable[[LoadOrder], str]
    end: Callable[[LoadOrder, LoadEnd], None]
    _orders: list[LoadOrder] = field(default_factory=list, init=False)
    """The first is being carried out."""

    def __post_init__(self) -> None:
        self._thread = DeviceThread(self.loader.device, "loads")

    @property
    def is_busy(self) -> bool:
        """True if a load is under way or waits."""
        return bool(self._orders)

    def add(self, message: LoadModel, snapshot_fd: int) -> None:
        """Load a model after the loads ordered before."""
        order = LoadOrder(message, snapshot_fd)
        self._orders.append(order)
        self._thread.submit(self._run, order)

    def cancel(self, model: str, on_end: Callable[[], None]) -> None:
        """Cancel all loads of a model; call ``on_end`` when none is under way."""
        orders = [order for order in self._orders if order.model == model]
        for order in orders:
            order.is_cancelled = True
        if orders:
            orders[-1].on_end.append(on_end)
        else:
            on_end()

    def progress(self, *, is_waited_for: bool = False) -> LoadProgress | None:
        """Return the state of the present load, if there is one.

        ``is_waited_for``: the present turn cannot begin, because the load has the pages.
        """
        if not self._orders or self._orders[0].began_s is None:
            return None
        order, num_waiting = self._orders[0], len(self._orders) - 1
        stage, is_held = self.loader.stages.text, self.loader.turns.is_held or is_waited_for
        return LoadProgress(order.model, order.began_s or 0.0, stage, num_waiting, is_held)

    def _run(self, order: LoadOrder) -> None:
        with WORKER.beside(ThreadPhase.LOAD, order.model):
            try:
                end = self._load(order)
            except BaseException as error:
                _logger.exception("loading %s failed", order.model)
                self.loader.turns.fail(error)
                threading.Event().wait()  # the process ends, while the activity page names the load
                raise
        self.loader.turns.call(self._finish, order, end)

    def _load(self, order: LoadOrder) -> LoadEnd:
        try:
            self.loader.turns.call(self._start, order)
            snapshot = order.take_snapshot(self.loader.device.num_ranks)
            kept = self._fitting(order)
            return self.loader.load(order.message, snapshot, order.engine_name, order.check, kept)
        except RankLost:  # the process ends too: no failure of the model
            raise
        except (GpupoolError, OSError) as error:
            if not order.is_cancelled:
                _logger.exception("loading %s failed", order.model)
            self._close_kept(order)
            return error

    def _fitting(self, order: LoadOrder) -> KeptEngine | None:
        """Return the kept engine for the load, which then owns it; close one of another family."""
        if order.kept is None:
            return None
        if (grammars := self.loader.grammars_for(order.kept, order.message)) is None:
            self._close_kept(order)
            return None
        kept, order.kept = KeptEngine(order.kept, grammars), None
        return kept

    def _close_kept(self, order: LoadOrder) -> None:
        if order.kept is not None:
            self.loader.turns.call(order.kept.close)
            order.kept = None

    def _start(self, order: LoadOrder) -> None:
        order.began_s = time.monotonic()
        order.check()
        order.engine_name = self.begin(order)

    def _finish(self, order: LoadOrder, end: LoadEnd) -> None:
        self._orders.remove(order)
        if order.snapshot_fd >= 0:
            os.close(order.snapshot_fd)
        self.end(order, end)
        for then in order.on_end:
            then()
