"""Models on the frontends: the published list, and the mounted APIs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from gpupool_state import ModelRow
from gpupoold.control.frontends import Frontend, Frontends, NotMounted
from gpupoold.control.models.descriptions import to_load
from gpupoold.control.models.inspection import Inspector
from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.domain import ModelSpec, ModelState
from gpupoold.errors import GpupoolError
from gpupoold.wire import messages as m


class ModelMounts(ModelPart):
    """Publishes the models with their states, and mounts the APIs of loaded models."""

    def __init__(self, parts: ControlParts, frontends: Frontends, inspector: Inspector) -> None:
        super().__init__(parts)
        self._frontends = frontends
        self._inspector = inspector
        self._hidden: set[str] = set()
        self._opening: set[str] = set()
        # Models that some frontend did not mount in time: a new frontend would not either.
        self._stuck: set[str] = set()
        self._publishing = asyncio.Lock()
        self._published = m.ModelList([], ready=False)
        self._in_turn = asyncio.Lock()  # frontends mount one model at a time anyway

    @contextlib.contextmanager
    def hiding(self, adapter: str) -> Iterator[None]:
        """Leave an adapter out of the published list inside the context."""
        self._hidden.add(adapter)
        self._fleet.wake()
        try:
            yield
        finally:
            self._hidden.discard(adapter)
            self._fleet.wake()

    async def publish(self) -> None:
        """Send the models and states to the frontends, unless they are as sent before.

        The controller publishes after each change; a user's change waits for the new list.
        """
        async with self._publishing:  # a list read before a change must not be sent after it
            rows = await self._registry.list()
            now = m.ModelList([self._served(row) for row in rows], self._supervisor.any_in_service)
            if now != self._published:
                self._published = now
                self._frontends.send(now)

    async def remount(self, spec: ModelSpec) -> None:
        """Apply the changed names of a model: to the fleet, the mounted API and the list.

        Raises GpupoolError: the frontends' reason; the list is not published.
        """
        self._fleet.changed(spec)
        await self.mount(spec.name)
        await self.publish()

    async def open(self, name: str) -> None:
        """Open a loaded model for requests.

        The frontends get the state first, and the answer to the mount confirms the state: a client
        that reads ``ready`` can use the model. Raises GpupoolError: the frontends' reason, or the
        model is in quarantine.
        """
        async with self._in_turn:
            if self._fleet.breakers.close(name, time.monotonic()):
                self._history.record_event(
                    "info", "model_recovered", name, "loaded, and ready again"
                )
            self._opening.add(name)
            try:
                await self.publish()
                await self._mount(name)
                self._fleet.check_quarantine(name)  # the model may have crashed a worker
                self._fleet.opened(name)
            finally:
                self._opening.discard(name)
            await self._registry.set_state(name, ModelState.READY)

    async def mount(self, name: str) -> None:
        """Mount or remount the API of a model, if loaded, on all frontends.

        Raises GpupoolError: the frontends' reason, or that of a check of the chat template.
        """
        if self._fleet.loaded(name) is not None:
            async with self._in_turn:
                await self._mount(name)

    async def _mount(self, name: str) -> None:
        """Mount a model as registered now: an earlier description must not be mounted later."""
        spec = (await self.find(name)).spec
        await self._inspector.check_chat(spec)
        loaded = self._fleet.loaded(name)
        if loaded is None:
            return  # withdrawn meanwhile
        try:
            await self._frontends.serve(to_load(spec, self._settings), loaded)
        except NotMounted:
            self._stuck.add(name)
            raise
        self._stuck.discard(name)

    async def mount_all(self, frontend: Frontend) -> None:
        """Mount every loaded model on a new frontend."""
        await self.publish()
        frontend.send(self._published)
        for row in await self._registry.list():
            name, loaded = row.spec.name, self._fleet.loaded(row.spec.name)
            if loaded is None or name in self._stuck:
                continue
            try:
                await self._inspector.check_chat(row.spec)
                await frontend.serve(to_load(row.spec, self._settings), loaded)
            except GpupoolError as error:
                if isinstance(error, NotMounted):
                    self._stuck.add(name)
                self._history.record_event("error", "model_not_mounted", name, str(error))
        await self.publish()

    def unmount(self, model: str) -> None:
        """Unmount the model's API from all frontends."""
        self._stuck.discard(model)
        self._fleet.unmounted(model)
        self._frontends.send(m.StopServing(model))

    def _served(self, row: ModelRow) -> m.ServedModel:
        """Return a model as clients see it; a model that is being opened is ready."""
        now, is_open = self._fleet.availability(row.spec.name), row.spec.name in self._opening
        return m.ServedModel(
            name=row.spec.name,
            aliases=row.spec.aliases,
            state=(ModelState.READY if is_open else now.state).value,
            created_at=row.created_at,
            reason="" if is_open else now.reason,
            retry_at_s=now.retry_at_s or 0.0,
            max_model_len=row.loaded_max_model_len,
            presets=row.spec.presets,
            pace=row.spec.pace,
            adapters=tuple(
                adapter for adapter in row.spec.adapters if adapter.name not in self._hidden
            ),
        )
