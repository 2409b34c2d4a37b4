"""The existing models with states, from the daemon. Pure.

A caller may be restricted to some models: the others do not exist for that caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from gpupoold.domain import ModelState
from gpupoold.frontend.errors import bad_request, no_such_model, not_ready, starting
from gpupoold.wire.messages import ServedModel

Scope = frozenset[str] | None
"""The names of the models that exist for a caller; None means all."""


class Catalog:
    """The registered models by name and alias."""

    def __init__(self) -> None:
        self.ready = False
        self._is_known = False
        self._models: dict[str, ServedModel] = {}
        self._by_any_name: dict[str, ServedModel] = {}

    def replace(self, models: Iterable[ServedModel], ready: bool) -> None:
        """Replace the list."""
        self.ready = ready
        self._is_known = True
        self._models = {one.name: one for model in models for one in (model, *_further(model))}
        # A name takes precedence over an equal alias.
        self._by_any_name = {
            alias: model for model in self._models.values() for alias in model.aliases
        } | self._models

    def find(self, name: str, scope: Scope = None) -> ServedModel:
        """The model of this name or alias.

        Raises:
            ApiError: 404, with the nearest names; 503 before the daemon named any.
        """
        self._require_known()
        model = self._by_any_name.get(name)
        if model is None or not _is_in(model, scope):
            known = [name for name, one in self._by_any_name.items() if _is_in(one, scope)]
            raise no_such_model(name, known)
        return model

    def choose(self, name: str | None, scope: Scope = None) -> ServedModel:
        """Return the model for ``name``; None means the only model.

        Raises:
            ApiError: 400 without a name among several models, 404 for an unknown model, 503 for a
                model that is not ready.
        """
        self._require_known()
        model = self._only_model(scope) if name is None else self.find(name, scope)
        if model.state != ModelState.READY:
            raise not_ready(model)
        return model

    def list_rows(self, scope: Scope = None) -> list[dict[str, object]]:
        """The rows of ``GET /v1/models``.

        Raises:
            ApiError: 503 before the daemon named any model.
        """
        self._require_known()
        return [model_row(model) for model in self._in(scope)]

    def _require_known(self) -> None:
        # Before the first list of models, an unknown name is not an error of the client.
        if not self._is_known:
            raise starting()

    def _only_model(self, scope: Scope) -> ServedModel:
        models = [model for model in self._in(scope) if not model.parent]
        if len(models) == 1:
            return models[0]
        raise bad_request(
            f"The request names no `model` and {len(models)} models are registered; "
            "GET /v1/models lists them.",
            param="model",
        )

    def _in(self, scope: Scope) -> list[ServedModel]:
        return [model for model in self._models.values() if _is_in(model, scope)]


def _further(model: ServedModel) -> Iterator[ServedModel]:
    """Yield a model's presets and adapters, each as a model of its own."""
    alone = msgspec.structs.replace(model, parent=model.name, aliases=(), presets=(), adapters=())
    for preset in model.presets:
        yield msgspec.structs.replace(alone, name=preset.name, presets=(preset,))
    for adapter in model.adapters:
        yield msgspec.structs.replace(alone, name=adapter.name)


def _is_in(model: ServedModel, scope: Scope) -> bool:
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
