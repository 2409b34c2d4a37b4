"""The name of the model in an answer: the name in the request, of a model, an alias, a preset or an
adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

_current: ContextVar[str | None] = ContextVar("requested_model", default=None)


@contextlib.contextmanager
def answering_as(name: str) -> Iterator[None]:
    """Name the model so in the answers made in the context, and in its tasks."""
    token = _current.set(name)
    try:
        yield
    finally:
        _current.reset(token)


def name_as_requested(models: Any) -> None:
    """Make vLLM's list of served names return the name in the request.

    vLLM names an alias's model, of which a preset is one here.
    """
    name_of: Callable[..., str] = models.model_name

    def requested(lora_request: Any = None) -> str:
        return _current.get() or name_of(lora_request)

    models.model_name = requested
