"""Which models exist and in which state, as the daemon last said. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gpupoold.domain import ModelState
from gpupoold.frontend.errors import ApiError, bad_request, no_such_model, not_ready, starting
from gpupoold.wire.messages import ServedModel


class Catalog:
    """The registered models by name and alias."""

    def __init__(self) -> None:
        self.ready = False
        self._is_known = False
        self._models: dict[str, ServedModel] = {}
        self._by_any_name: dict[str, ServedModel] = {}

    def replace(self, models: Iterable[ServedModel], ready: bool) -> None:
        """Forget the list held before and take this one."""
        self.ready = ready
        self._is_known = True
        self._models = {model.name: model for model in models}
        # A name wins over an alias that is spelt the same.
        self._by_any_name = {
            alias: model for model in self._models.values() for alias in model.aliases
        } | self._models

    def find(self, name: str) -> ServedModel:
        """The model of this name or alias.

        Raises:
            ApiError: 404, with the nearest names; 503 before the daemon named any.
        """
        self._require_known()
        model = self._by_any_name.get(name)
        if model is None:
            raise no_such_model(name, self._by_any_name)
        return model

    def choose(self, name: str | None) -> ServedModel:
        """The model that answers a request for ``name``; None means the only one there is.

        Raises:
            ApiError: 400 without a name among several models, 404 for an
                unknown one, 503 for one that is not ready.
        """
        self._require_known()
        model = self._only_model() if name is None else self.find(name)
        if model.state != ModelState.READY:
            raise not_ready(model)
        return model

    def list_rows(self) -> list[dict[str, object]]:
        """The rows of ``GET /v1/models``.

        Raises:
            ApiError: 503 before the daemon named any model.
        """
        self._require_known()
        return [model_row(model) for model in self._models.values()]

    def _require_known(self) -> None:
        # "There is no such model" would be a lie while nobody has said which there are.
        if not self._is_known:
            raise starting()

    def _only_model(self) -> ServedModel:
        if len(self._models) == 1:
            return next(iter(self._models.values()))
        raise _model_missing(len(self._models))


def model_row(model: ServedModel) -> dict[str, object]:
    """A model as ``/v1/models`` shows it: OpenAI's fields, then ours."""
    row: dict[str, object] = {
        "id": model.name,
        "object": "model",
        "created": int(model.created_at),
        "owned_by": "gpupool",
        "max_model_len": model.max_model_len,
        "status": model.state,
        "aliases": list(model.aliases),
    }
    if model.reason:
        row["reason"] = model.reason
    return row


def _model_missing(num_models: int) -> ApiError:
    return bad_request(
        f"The request names no `model` and {num_models} models are registered; "
        "GET /v1/models lists them.",
        param="model",
    )
