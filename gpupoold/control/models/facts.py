"""Facts from loads of models: sizes for the registry, and latency profiles."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from gpupool_state import History, Registry
from gpupoold.control.models.profiles import is_profiled, latency_model_of, profile_rows
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import ModelSpec
from gpupoold.errors import GpupoolError
from gpupoold.latency.errors import LatencyError
from gpupoold.scheduling.costs import ModelCosts, costs_of
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)

# The longest time for profiling a model; the device serves no other model meanwhile. On emulated
# devices, which are for trials with small models, additions must be quick. A simulated device
# reports its latency model at once.
_PROFILING_BUDGET_S = {"cuda": 3.0, "emulated": 1.0, "sim": 1.0}


class LoadFacts:
    """Stores the facts of loads."""

    def __init__(self, registry: Registry, history: History) -> None:
        self._registry = registry
        self._history = history

    async def profiling_budget_s(self, name: str, worker: Worker) -> float:
        """Return the time for profiling: models are profiled once per kind of device."""
        row = await self._registry.get(name)
        known = row is None or worker.ready is None or is_profiled(row, worker.ready)
        return 0.0 if known else self.full_budget_s(worker)

    def full_budget_s(self, worker: Worker) -> float:
        """Return the time for profiling a model whose steps are unknown."""
        return _PROFILING_BUDGET_S[worker.device.kind]

    async def with_adapters(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec with the adapters now, which can be added while a load waits."""
        row = await self._registry.get(spec.name)
        return spec if row is None else replace(spec, adapters=row.spec.adapters)

    async def keep(self, spec: ModelSpec, worker: Worker, loaded: m.ModelLoaded) -> None:
        """Store the facts of a load and the measured profile, if there is one."""
        for name, problem in loaded.model.adapter_problems.items():
            text = f"adapter {name} was not loaded: {problem}"
            self._history.record_event("error", "adapter_failed", spec.name, text)
        await self._registry.set_loaded(
            spec.name,
            architecture=loaded.model.architecture,
            weight_bytes=loaded.model.weight_bytes,
            kv_bytes_per_token=loaded.model.kv_bytes_per_token,
            max_model_len=loaded.model.max_model_len,
        )
        if loaded.profile is None or worker.ready is None:
            return
        problem = loaded.profile.problem
        try:
            rows = profile_rows(
                loaded.profile, loaded.model, spec.revision, worker.ready, time.time()
            )
            await self._registry.set_profiles(spec.name, rows)
        except GpupoolError as error:  # a model without a profile can serve too
            problem = f"{problem}; {error}" if problem else str(error)
        if problem:
            text = (
                f"{problem}; the model serves, and its steps are timed again with its next engine"
            )
            self._history.record_event("warning", "profile_incomplete", spec.name, text)

    async def keep_engine_bytes(self, name: str, worker: Worker, loaded: m.ModelLoaded) -> None:
        """Store the memory of an engine outside the pages, the estimate for later loads."""
        if worker.ready is not None:
            kind, num_bytes = worker.ready.device_name, loaded.memory.device_bytes
            await self._registry.set_engine_bytes(name, kind, num_bytes)

    async def costs(self, name: str, worker: Worker) -> ModelCosts | None:
        """Return the model's costs for the scheduling core, None while unknown."""
        row = await self._registry.get(name)
        if row is None or worker.ready is None:
            return None
        try:
            latency = latency_model_of(row, worker.ready.device_name)
        except LatencyError as error:
            _logger.warning("%s: the stored latency is unusable: %s", name, error)
            return None
        return costs_of(latency) if latency is not None else None
