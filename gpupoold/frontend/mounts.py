"""The models of a frontend: those that exist, with states, and the mounted APIs."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from gpupoold.domain import ModelState
from gpupoold.frontend.errors import bad_request, no_such_model, not_ready, starting
from gpupoold.stats.histogram import Histogram
from gpupoold.wire.messages import RequestsFailed, ServedModel, StepOutputs

logger = logging.getLogger(__name__)

ModelScope = frozenset[str] | None
"""The names of the models that exist for a caller; None means all."""


class ModelApi(Protocol):
    """One model's complete HTTP API."""

    @property
    def app(self) -> ASGIApp: ...

    @property
    def paths(self) -> frozenset[str]: ...

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
        self._retire(name)
        for mount in self._retired.get(name, ()):
            mount.api.stop(message)

    def unmount_all(self, message: str) -> None:
        for name in {*self._current, *self._retired}:
            self.unmount(name, message)

    def deliver(self, outputs: StepOutputs) -> None:
        mount = self._current.get(outputs.model)
        if mount is not None:
            mount.api.push(outputs)
        # The daemon may replace an API while its requests run; an id names the request's API.
        for retired in self._retired.get(outputs.model, ()):
            retired.api.push(outputs)

    def fail(self, failed: RequestsFailed) -> None:
        current = self._current.get(failed.model)
        for mount in [current, *self._retired.get(failed.model, ())]:
            if mount is not None:
                status = HTTPStatus(failed.status)
                mount.api.fail(failed.request_ids, failed.message, status, failed.code)

    async def serve(self, mount: Mount, scope: Scope, receive: Receive, send: Send) -> None:
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


class Catalog:
    """The registered models by name and alias.

    A caller may be restricted to some models: the others do not exist for that caller.
    """

    def __init__(self) -> None:
        self.ready = False
        self._is_known = False
        self._models: dict[str, ServedModel] = {}
        self._by_any_name: dict[str, ServedModel] = {}

    def replace(self, models: Iterable[ServedModel], ready: bool) -> None:
        self.ready = ready
        self._is_known = True
        self._models = {
            named.name: named for model in models for named in (model, *_further(model))
        }
        # A name takes precedence over an equal alias.
        self._by_any_name = {
            alias: model for model in self._models.values() for alias in model.aliases
        } | self._models

    def find(self, name: str, scope: ModelScope = None) -> ServedModel:
        """The model of this name or alias.

        Raises ApiError: 404, with the nearest names; 503 before the daemon named any.
        """
        self._require_known()
        model = self._by_any_name.get(name)
        if model is None or not _is_in(model, scope):
            known = [name for name, model in self._by_any_name.items() if _is_in(model, scope)]
            raise no_such_model(name, known)
        return model

    def choose(self, name: str | None, scope: ModelScope = None) -> ServedModel:
        """Return the model for ``name``; None means the only model.

        Raises ApiError: 400 without a name among several models, 404 for an unknown model, 503 for
        a model that is not ready.
        """
        self._require_known()
        model = self._only_model(scope) if name is None else self.find(name, scope)
        if model.state != ModelState.READY:
            raise not_ready(model)
        return model

    def list_rows(self, scope: ModelScope = None) -> list[dict[str, object]]:
        """The rows of ``GET /v1/models``.

        Raises ApiError: 503 before the daemon named any model.
        """
        self._require_known()
        return [model_row(model) for model in self._in(scope)]

    def _require_known(self) -> None:
        # Before the first list of models, an unknown name is not an error of the client.
        if not self._is_known:
            raise starting()

    def _only_model(self, scope: ModelScope) -> ServedModel:
        models = [model for model in self._in(scope) if not model.parent]
        if len(models) == 1:
            return models[0]
        raise bad_request(
            f"The request names no `model` and {len(models)} models are registered; "
            "GET /v1/models lists them.",
            param="model",
        )

    def _in(self, scope: ModelScope) -> list[ServedModel]:
        return [model for model in self._models.values() if _is_in(model, scope)]


def _further(model: ServedModel) -> Iterator[ServedModel]:
    """Yield a model's presets and adapters, each as a model of its own."""
    alone = msgspec.structs.replace(model, parent=model.name, aliases=(), presets=(), adapters=())
    for preset in model.presets:
        yield msgspec.structs.replace(alone, name=preset.name, presets=(preset,))
    for adapter in model.adapters:
        yield msgspec.structs.replace(alone, name=adapter.name)


def _is_in(model: ServedModel, scope: ModelScope) -> bool:
    return scope is None or model.name in scope


def model_row(model: ServedModel) -> dict[str, object]:
    """Return a model for ``/v1/models``: OpenAI's fields, then gpupool's."""
    row: dict[str, object] = {
        "id": model.name,
        "object": "model",
        "created": int(model.created_at),
        "owned_by": "gpupool",
        "max_model_len": model.max_model_len,
        "status": model.state,
        "aliases": list(model.aliases),
    }
    if model.parent:
        row["parent"] = model.parent
    if model.reason:
        row["reason"] = model.reason
    return row
