"""Loaded models: on which instances, with which image, mounted in the frontend."""

from __future__ import annotations

import logging
import os
import time

from gpupool_state import Registry
from gpupoold.config import Settings
from gpupoold.domain import ModelSpec
from gpupoold.errors import Refused
from gpupoold.pool.dispatch import Dispatcher
from gpupoold.pool.frontends import FrontendSupervisor
from gpupoold.pool.image_cache import ImageCache
from gpupoold.pool.instances import Instance, InstanceSupervisor
from gpupoold.pool.specs import to_load
from gpupoold.units import format_bytes
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)


class ModelLoader:
    """Puts models on instances and takes them off; routes requests to those that have them."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        dispatcher: Dispatcher,
        supervisor: InstanceSupervisor,
        cache: ImageCache,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._cache = cache
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

    async def load(self, spec: ModelSpec, instance: Instance) -> None:
        """Load on one instance; does nothing when it has the model already.

        Raises:
            GpupoolError: the instance's reason, or no room in the model cache.
        """
        name = spec.name
        if name in instance.models:
            return
        image = self._cache.get(name)
        started_s = time.monotonic()
        loaded, fd = await self._supervisor.load(
            instance,
            to_load(spec, self._settings),
            image.fd if image else None,
            image.digest if image else "",
        )
        try:
            self._cache.check_room(name, os.fstat(fd).st_size)
        except Refused:
            os.close(fd)
            await self._supervisor.unload(instance, name)
            raise
        self._cache.put(name, fd, loaded.layout_digest)
        self._loaded[name] = loaded.model
        await self._registry.set_loaded(
            name,
            architecture=loaded.model.architecture,
            weight_bytes=loaded.model.weight_bytes,
            kv_bytes_per_token=loaded.model.kv_bytes_per_token,
            max_model_len=loaded.model.max_model_len,
        )
        self._dispatcher.targets[name] = spec.targets
        self._dispatcher.routes.setdefault(name, []).append(instance)
        _logger.info(
            "%s loaded on instance %d in %.2f s: %s of weights",
            name,
            instance.number,
            time.monotonic() - started_s,
            format_bytes(loaded.model.weight_bytes),
        )

    async def serve(self, spec: ModelSpec) -> None:
        """Mount or remount the model's API.

        Raises:
            GpupoolError: the frontend's reason.
        """
        if self.frontend is not None:
            await self.frontend.serve(to_load(spec, self._settings), self._loaded[spec.name])
        self._served.add(spec.name)

    async def unload(self, name: str) -> None:
        """Take the model off the frontend and all instances; its image is dropped."""
        self._dispatcher.routes.pop(name, None)
        self._dispatcher.targets.pop(name, None)
        self._loaded.pop(name, None)
        self._served.discard(name)
        if self.frontend is not None:
            self.frontend.send(m.StopServing(name))
        for instance in self._supervisor.instances:
            await self._supervisor.unload(instance, name)
        self._cache.drop(name)
