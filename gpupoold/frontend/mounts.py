"""Mounted model APIs, and retired APIs that finish their requests."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from gpupoold.stats.histogram import Histogram
from gpupoold.wire.messages import RequestsFailed, StepOutputs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)


class ModelApi(Protocol):
    """One model's complete HTTP API."""

    @property
    def app(self) -> AsgiApp:
        """The ASGI application for the model."""
        ...

    @property
    def paths(self) -> frozenset[str]:
        """The paths of the application."""
        ...

    def push(self, outputs: StepOutputs) -> None:
        """Pass on the outputs of one engine step; ignore unknown ids."""
        ...

    def fail(
        self, request_ids: Iterable[str], message: str, status: HTTPStatus, code: str = ""
    ) -> None:
        """End these requests' streams with an error; unknown ids are ignored.

        ``code`` is the error's code if different from the status.
        """
        ...

    def stop(self, message: str) -> None:
        """End every open and every later request with an error."""
        ...

    def openapi(self) -> dict[str, Any]:
        """The application's OpenAPI description; the first call may block for a second."""
        ...

    def owns_response(self, response_id: str) -> bool:
        """Return whether the Responses API of this model stored that response."""
        ...

    def take_paced_gaps(self) -> Histogram:
        """Return the times between tokens of paced streams since the last call."""
        ...

    def close(self) -> None:
        """Release threads and memory; may block. No other call may follow."""
        ...


@dataclass(eq=False)
class Mount:
    """A mounted API; ``num_active`` counts HTTP requests inside its application."""

    name: str
    api: ModelApi
    num_active: int = 0
    retired: bool = False


class Mounts:
    """Owner of all model APIs; for the event loop.

    A retired API takes no new requests, still gets engine outputs for its requests, and is closed
    at the end of the last one. ``note_garbage`` is told of each closed API: an application consists
    of reference cycles of some MB, which only a collection frees.
    """

    def __init__(self, note_garbage: Callable[[], object] = gc.collect) -> None:
        self._note_garbage = note_garbage
        self._current: dict[str, Mount] = {}
        self._retired: dict[str, list[Mount]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._past: set[str] = set()

    def get(self, name: str) -> Mount | None:
        """Return the API that takes new requests for the model, None without a mount."""
        return self._current.get(name)

    def was_mounted(self, name: str) -> bool:
        """Return whether the model has a mount, or had one."""
        return name in self._past

    async def openapi(self) -> list[dict[str, Any]]:
        """Return a description for each kind of API; APIs with equal paths are alike."""
        kinds = {mount.api.paths: mount.api for mount in self._current.values()}
        return [await asyncio.to_thread(api.openapi) for api in kinds.values()]

    def take_paced_gaps(self) -> dict[str, str]:
        """Return histograms of the times between tokens of paced streams, as text by model.

        Covers the time since the last call, and only models with such tokens.
        """
        found = {name: mount.api.take_paced_gaps() for name, mount in self._current.items()}
        return {name: gaps.text() for name, gaps in found.items() if len(gaps)}

    def find_response(self, response_id: str) -> Mount | None:
        """Return the API that stored this response, if any."""
        for mount in self._current.values():
            if mount.api.owns_response(response_id):
                return mount
        return None

    def mount(self, name: str, api: ModelApi) -> None:
        """Direct new requests to ``api``; an earlier API finishes its requests."""
        self._retire(name)
        self._current[name] = Mount(name, api)
        self._past.add(name)

    def unmount(self, name: str, message: str) -> None:
        """Take no more requests for the model; end open ones with ``message``."""
        self._retire(name)
        for mount in self._retired.get(name, ()):
            mount.api.stop(message)

    def unmount_all(self, message: str) -> None:
        """Take no more requests at all; end open ones with ``message``."""
        for name in {*self._current, *self._retired}:
            self.unmount(name, message)

    def deliver(self, outputs: StepOutputs) -> None:
        """Pass one engine step's outputs to the model's API."""
        mount = self._current.get(outputs.model)
        if mount is not None:
            mount.api.push(outputs)
        # The daemon may replace an API while its requests run; an id names the request's API.
        for retired in self._retired.get(outputs.model, ()):
            retired.api.push(outputs)

    def fail(self, failed: RequestsFailed) -> None:
        """End the named requests' streams with the daemon's message."""
        current = self._current.get(failed.model)
        for mount in [current, *self._retired.get(failed.model, ())]:
            if mount is not None:
                status = HTTPStatus(failed.status)
                mount.api.fail(failed.request_ids, failed.message, status, failed.code)

    async def serve(self, mount: Mount, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one HTTP request in the mount's application."""
        mount.num_active += 1
        try:
            await mount.api.app(scope, receive, send)
        finally:
            mount.num_active -= 1
            self._close_if_drained(mount)

    def _retire(self, name: str) -> None:
        mount = self._current.pop(name, None)
        if mount is None:
            return
        mount.retired = True
        self._retired.setdefault(name, []).append(mount)
        self._close_if_drained(mount)

    def _close_if_drained(self, mount: Mount) -> None:
        if not mount.retired or mount.num_active:
            return
        retired = self._retired[mount.name]
        retired.remove(mount)
        if not retired:
            del self._retired[mount.name]
        task = asyncio.create_task(self._release(mount))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _release(self, mount: Mount) -> None:
        try:
            await asyncio.to_thread(mount.api.close)
        except Exception:
            logger.exception("closing the API of %s", mount.name)
        del mount
        self._note_garbage()
