"""The model and the API for a request; requests of a starting server wait for models."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import msgspec

from gpupoold.frontend.catalog import Catalog, Scope
from gpupoold.frontend.errors import NotYet, not_ready
from gpupoold.frontend.mounts import Mount, Mounts
from gpupoold.wire.messages import ServedModel

_RETRY_UNMOUNTED_S = 1.0
_POLL_S = 0.05


@dataclass(slots=True)
class Hold:
    """The end of the time, on the monotonic clock, in which requests wait for their model."""

    until_s: float = 0.0

    def begin(self, duration_s: float) -> None:
        """Let requests wait for ``duration_s`` from now."""
        self.until_s = time.monotonic() + duration_s

    @property
    def is_over(self) -> bool:
        """True if requests for a model that is not ready are refused at once."""
        return time.monotonic() >= self.until_s


class ModelLookup:
    """Finds the model and the mount for a name in a request.

    After the start of a frontend, a request for a model that is being loaded or mounted for the
    first time waits until ``hold`` is over, so that a restart of the daemon delays new requests
    instead of refusing them.
    """

    def __init__(self, catalog: Catalog, mounts: Mounts, hold: Hold) -> None:
        self._catalog = catalog
        self._mounts = mounts
        self._hold = hold

    async def find(self, name: str | None, scope: Scope) -> tuple[ServedModel, Mount]:
        """Return the model and its mount; None means the only model.

        Raises:
            ApiError: as ``Catalog.choose``; 503 for a model without a mount.
        """
        while True:
            try:
                model = self._catalog.choose(name, scope)
                return model, self._mounted(model)
            except NotYet as error:
                if self._hold.is_over or self._mounts.was_mounted(error.model):
                    raise
            await asyncio.sleep(_POLL_S)

    def _mounted(self, model: ServedModel) -> Mount:
        mount = self._mounts.get(model.parent or model.name)
        if mount is None:
            starting = msgspec.structs.replace(
                model, state="starting", reason="", retry_after_s=_RETRY_UNMOUNTED_S
            )
            raise not_ready(starting)
        return mount
