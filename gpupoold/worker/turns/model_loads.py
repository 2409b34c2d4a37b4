"""Loading of a model: from a trusted snapshot, else from the checkpoint."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeVar

from gpupoold.errors import GpupoolError
from gpupoold.latency.stored import Profile
from gpupoold.memory.contracts import Device
from gpupoold.memory.host import HostBuffer, KvHostCache
from gpupoold.memory.prefix_fetcher import PrefixFetcher
from gpupoold.system.activity import ThreadPhase
from gpupoold.wire.messages import LoadModel
from gpupoold.worker.engine.engine import ModelEngine, load_engine
from gpupoold.worker.engine.load_errors import failure
from gpupoold.worker.heap import HEAP
from gpupoold.worker.kv.residency import Residency
from gpupoold.worker.profiling import profile
from gpupoold.worker.turn_thread import TurnThread
from gpupoold.worker.turns.early_start import first_self_check
from gpupoold.worker.turns.self_check import is_same_answer
from gpupoold.worker.weights.loading import ModelLoad, WeightSource
from gpupoold.worker.weights.rank_loads import LeaderLoad, LoadLinks
from gpupoold.worker.weights.torch_release import pages_for_torch

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class LoadStage(StrEnum):
    """The stages of a load."""

    BUILD = "builds the engine"
    SELF_CHECK = "runs the self-check"
    PROFILE = "times steps"


class Loaded(NamedTuple):
    """A loaded model, its self-check tokens, the problem with its snapshot, and its profile."""

    engine: ModelEngine
    self_check: tuple[int, ...]
    snapshot_problem: str
    profile: Profile | None = None


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
    current: Callable[[], str | None] = lambda: None
    links: LoadLinks | None = None
    prefixes: PrefixFetcher | None = None
    stage: LoadStage = field(default=LoadStage.BUILD, init=False)
    """The stage of the present load."""
    _check: Callable[[], None] = field(default=lambda: None, init=False)

    def load(
        self,
        message: LoadModel,
        snapshot: HostBuffer | None,
        name: str,
        check: Callable[[], None] = lambda: None,
    ) -> Loaded:
        """Load a model and add its engine as ``name`` to the residency; take ``snapshot`` over.

        Everything that steps the engine, or changes pages, runs on the turn thread in slices.

        ``check`` is called often, and may end the load by an error. With a snapshot the checkpoint
        is not read, unless the snapshot has another layout or the
        model fails its self-check with the snapshot.

        Raises:
            GpupoolError: the checkpoint cannot be served here.
            OSError: there is no host memory for a snapshot.
        """
        self._check = check
        loaded = self._load(message, snapshot, name)
        engine, budget_s = loaded.engine, message.profiling_budget_s
        self.stage = LoadStage.PROFILE
        run = profile(
            engine,
            self.residency,
            budget_s,
            message.model.path,
            slice_limit_s=self.turns.slice_limit_s,
        )
        try:
            measured = self._in_slices(run, ThreadPhase.PROFILE, engine)
        except BaseException:
            self._give_up(engine)
            raise
        return loaded._replace(profile=measured)

    def _load(self, message: LoadModel, snapshot: HostBuffer | None, name: str) -> Loaded:
        if snapshot is None:
            return self._from_checkpoint(message, None, "", name)
        spare = os.dup(snapshot.fd)  # a failed load closes the snapshot
        try:
            engine = self._build(message, snapshot, name, skips_checkpoint=True)
            self_check = self._try(engine)
            generates = engine.info.generates
            if not message.self_check or is_same_answer(
                message.self_check, self_check, generates=generates
            ):
                os.close(spare)
                return Loaded(engine, self_check, "")
        except GpupoolError as error:
            problem = f"not loaded from its snapshot: {error.message}"
            _logger.warning("%s: %s", message.model.name, problem)
            kept = HostBuffer(spare, snapshot.num_bytes)
            return self._from_checkpoint(message, kept, problem, name)
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
        self, message: LoadModel, snapshot: HostBuffer | None, name: str, *, skips_checkpoint: bool
    ) -> ModelEngine:
        model = message.model
        self.stage = LoadStage.BUILD
        try:
            snapshot_bytes = snapshot.num_bytes if snapshot and skips_checkpoint else 0
            num_released = pages_for_torch(model, self.device, snapshot_bytes)
            if not self.device.is_host_addressable:
                self.turns.call(HEAP.collect)  # closed engines may hold torch's memory
        except BaseException:
            if snapshot is not None:
                snapshot.close()
            raise
        new_load: Callable[..., ModelLoad] = ModelLoad
        if self.links is not None:
            new_load = functools.partial(LeaderLoad, links=self.links)
        load = new_load(
            model.name,
            self.device,
            self.residency.pool,
            WeightSource(snapshot, message.layout_digest, skips_checkpoint),
            num_released,
            make_room=self.residency.free_pages,
            turns=self.turns,
        )
        engine = load_engine(
            model,
            load,
            self.host,
            name,
            self.prefixes,
            # A snapshot that could not be used may be of other files than the checkpoint's.
            message.kv_identity if snapshot is None or skips_checkpoint else "",
        )
        self.turns.call(self.residency.add, engine)
        return engine

    def _try(self, engine: ModelEngine) -> tuple[int, ...]:
        """Run the self-check; unload the model if the self-check fails with an error."""
        self.stage = LoadStage.SELF_CHECK
        try:
            return self._in_slices(self._checked(engine), ThreadPhase.SELF_CHECK, engine)
        except Exception as error:
            self._give_up(engine)
            if isinstance(error, GpupoolError):
                raise
            raise failure(engine.info.name, "in its self-check", error) from error

    def _checked(self, engine: ModelEngine) -> Generator[None, None, tuple[int, ...]]:
        """Bring the weights onto the device beside the turns, then run the self-check."""
        while self.residency.load_piece(engine.name, self.current()):
            yield
        self_check = yield from first_self_check(engine, self.residency, self.device)
        engine.kv.unmap(engine.kv.free_extents())
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
