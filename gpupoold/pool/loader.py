"""Loaded models: on which instances, with which image, mounted in the frontend."""

from __future__ import annotations

import logging
import os
import time

from gpupool_state import History, Registry
from gpupoold.config import Settings
from gpupoold.domain import ModelSpec
from gpupoold.errors import GpupoolError, Refused
from gpupoold.latency.errors import LatencyError
from gpupoold.pool.dispatch import Dispatcher
from gpupoold.pool.frontends import FrontendSupervisor
from gpupoold.pool.image_cache import CachedImage, ImageCache
from gpupoold.pool.image_files import SavedImage
from gpupoold.pool.instances import Instance, InstanceSupervisor
from gpupoold.pool.profiles import is_profiled, latency_model_of, profile_rows
from gpupoold.pool.saved_images import SavedImages
from gpupoold.pool.specs import to_load
from gpupoold.scheduling.costs import ModelCosts, costs_of
from gpupoold.units import format_bytes
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)

# How long a model may keep a device to itself while its steps are timed. What is played by
# a CPU is small and for trying things out: adding a model shall be quick there.
# What is simulated keeps to a law that it can tell at once.
_PROFILING_BUDGET_S = {"cuda": 3.0, "emulated": 1.0, "sim": 1.0}


class ModelLoader:
    """Puts models on instances and takes them off; routes requests to those that have them."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        history: History,
        dispatcher: Dispatcher,
        supervisor: InstanceSupervisor,
        cache: ImageCache,
        saved: SavedImages,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._history = history
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._cache = cache
        self._saved = saved
        self._loaded: dict[str, m.LoadedModel] = {}
        self._served: set[str] = set()
        self.frontend: FrontendSupervisor | None = None

    def is_loaded(self, name: str) -> bool:
        """Whether the model has been loaded since the daemon started."""
        return name in self._loaded

    def is_open(self, name: str) -> bool:
        """Whether an instance has the model and its API has been mounted."""
        return name in self._served and bool(self._dispatcher.routes.get(name))

    async def load_everywhere(self, spec: ModelSpec) -> None:
        """Load on every instance.

        Raises:
            GpupoolError: the first reason why not; call ``unload`` then.
        """
        for instance in self._supervisor.instances:
            await self._supervisor.wait_ready(instance)
            await self.load(spec, instance)
        self._dispatcher.check_servable()

    async def load(self, spec: ModelSpec, instance: Instance) -> None:
        """Load on one instance; does nothing when it has the model already.

        Raises:
            GpupoolError: the instance's reason, or no room in the model cache.
        """
        name = spec.name
        if name in instance.models:
            return
        image = await self._image(spec, instance)
        started_s = time.monotonic()
        loaded, fd = await self._supervisor.load(
            instance,
            to_load(spec, self._settings),
            image,
            await self._profiling_budget_s(spec, instance),
        )
        if fd is not None:
            kept = await self._keep_image(instance, fd, loaded)
            if image is None or loaded.image_problem:
                self._saved.keep(name, kept)
        self._loaded[name] = loaded.model
        await self._registry.set_loaded(
            name,
            architecture=loaded.model.architecture,
            weight_bytes=loaded.model.weight_bytes,
            kv_bytes_per_token=loaded.model.kv_bytes_per_token,
            max_model_len=loaded.model.max_model_len,
        )
        await self._keep_profile(spec, instance, loaded)
        costs = await self._costs(name, instance)
        self._dispatcher.host(spec.targets, loaded.model, costs, instance)
        _logger.info(
            "%s loaded on instance %d in %.2f s: %s of weights",
            name,
            instance.number,
            time.monotonic() - started_s,
            format_bytes(loaded.model.weight_bytes),
        )

    async def _costs(self, name: str, instance: Instance) -> ModelCosts | None:
        """What the scheduling core is told of the model's speed; None while it is not known."""
        row = await self._registry.get(name)
        if row is None or instance.ready is None:
            return None
        try:
            latency = latency_model_of(row, instance.ready.device_name)
        except LatencyError as error:
            _logger.warning("%s: what is stored of its latency is unusable: %s", name, error)
            return None
        return costs_of(latency) if latency is not None else None

    async def _image(self, spec: ModelSpec, instance: Instance) -> CachedImage | None:
        """The model's image, from the disk if need be; None when it is to be made."""
        name, ready = spec.name, instance.ready
        if instance.device.kind == "sim" or ready is None:
            return None
        if self._cache.get(name) is None:
            saved = await self._saved.find(to_load(spec, self._settings), ready)
            if saved is not None:
                self._take(name, saved)
        return self._cache.get(name)

    def _take(self, name: str, saved: SavedImage) -> None:
        try:
            self._cache.check_room(name, saved.num_bytes)
        except Refused:  # the load will come to the same end, and say so
            os.close(saved.fd)
            return
        self._cache.put(name, saved.fd, saved.layout_digest, saved.canary)

    async def _keep_image(self, instance: Instance, fd: int, loaded: m.ModelLoaded) -> CachedImage:
        name = loaded.model.name
        if loaded.image_problem:
            self._history.record_event("error", "image_refused", name, loaded.image_problem)
        try:
            self._cache.check_room(name, os.fstat(fd).st_size)
        except Refused:
            os.close(fd)
            await self._supervisor.unload(instance, name)
            raise
        return self._cache.put(name, fd, loaded.layout_digest, loaded.canary)

    async def _profiling_budget_s(self, spec: ModelSpec, instance: Instance) -> float:
        """Models are measured once on each kind of device, when they are registered."""
        row = await self._registry.get(spec.name)
        known = row is None or instance.ready is None or is_profiled(row, instance.ready)
        return 0.0 if known else _PROFILING_BUDGET_S[instance.device.kind]

    async def _keep_profile(
        self, spec: ModelSpec, instance: Instance, loaded: m.ModelLoaded
    ) -> None:
        """Store what the instance measured. A model whose latency is unknown serves as well."""
        measured, ready = loaded.profile, instance.ready
        if measured is None or ready is None:
            return
        problem = measured.problem
        try:
            rows = profile_rows(measured, loaded.model, spec.revision, ready, time.time())
            await self._registry.set_profiles(spec.name, rows)
        except GpupoolError as error:
            problem = f"{problem}; {error}" if problem else str(error)
        if problem:
            _logger.warning("%s: not all of its latency is known: %s", spec.name, problem)
            self._history.record_event("warning", "profile_incomplete", spec.name, problem)

    async def serve(self, spec: ModelSpec) -> None:
        """Mount or remount the model's API.

        Raises:
            GpupoolError: the frontend's reason.
        """
        if self.frontend is not None:
            await self.frontend.serve(to_load(spec, self._settings), self._loaded[spec.name])
        self._served.add(spec.name)

    async def unload(self, name: str) -> None:
        """Take the model off the frontend and all instances; its images are dropped."""
        self._dispatcher.forget(name)
        self._loaded.pop(name, None)
        self._served.discard(name)
        if self.frontend is not None:
            self.frontend.send(m.StopServing(name))
        for instance in self._supervisor.instances:
            await self._supervisor.unload(instance, name)
        self._cache.drop(name)
        self._saved.forget(name)
