"""Loading of a model: from a trusted snapshot, else from the checkpoint."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

from gpupoold.errors import GpupoolError
from gpupoold.latency.stored import Profile
from gpupoold.memory.contracts import Device
from gpupoold.memory.host import HostBuffer, KvHostCache
from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.wire.messages import LoadModel
from gpupoold.worker.engine.engine import ModelEngine, load_engine
from gpupoold.worker.engine.load_errors import failure
from gpupoold.worker.kv.residency import Residency
from gpupoold.worker.profiling import profile
from gpupoold.worker.turns.self_check import is_same_answer, run_self_check
from gpupoold.worker.weights.loading import ModelLoad
from gpupoold.worker.weights.torch_release import pages_for_torch

_logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A loaded model, its self-check tokens, the problem with its snapshot, and its profile."""

    engine: ModelEngine
    self_check: tuple[int, ...]
    snapshot_problem: str
    profile: Profile | None = None


class EngineLoader:
    """Loads models onto one device."""

    def __init__(self, device: Device, host: KvHostCache, residency: Residency) -> None:
        self._device = device
        self._host = host
        self._residency = residency

    def load(self, message: LoadModel, snapshot: HostBuffer | None, name: str) -> Loaded:
        """Load a model and add its engine as ``name`` to the residency; take ``snapshot`` over.

        With a snapshot the checkpoint is not read, unless the snapshot has another layout or the
        model fails its self-check with the snapshot.

        Raises:
            GpupoolError: the checkpoint cannot be served here.
            OSError: there is no host memory for a snapshot.
        """
        loaded = self._load(message, snapshot, name)
        engine, budget_s = loaded.engine, message.profiling_budget_s
        try:
            with WORKER.main.doing(ThreadPhase.PROFILE, engine.info.name):
                measured = profile(engine, self._residency, budget_s, message.model.path)
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
        try:
            num_released = pages_for_torch(model, self._device)
            if num_released:
                self._residency.free_pages(num_released)
        except BaseException:
            if snapshot is not None:
                snapshot.close()
            raise
        load = ModelLoad(
            model.name,
            self._device,
            self._residency.pool,
            snapshot,
            message.layout_digest,
            num_released,
            skips_checkpoint=skips_checkpoint,
        )
        engine = load_engine(model, load, self._device, self._host, name)
        self._residency.add(engine)
        return engine

    def _try(self, engine: ModelEngine) -> tuple[int, ...]:
        """Run the self-check; unload the model if the self-check fails with an error."""
        try:
            with WORKER.main.doing(ThreadPhase.SELF_CHECK, engine.info.name):
                self_check = run_self_check(engine, self._residency)
            engine.kv.unmap(engine.kv.free_extents())
            return self_check
        except Exception as error:
            self._give_up(engine)
            if isinstance(error, GpupoolError):
                raise
            raise failure(engine.info.name, "in its self-check", error) from error

    def _give_up(self, engine: ModelEngine) -> None:
        self._residency.remove(engine.name)
        engine.close()
