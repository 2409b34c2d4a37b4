"""Values of the HTTP request being served, found by the context of the API's tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class RequestLocal(Generic[T]):
    """A value for each HTTP request, as ``threading.local`` has for each thread."""

    def __init__(self, name: str) -> None:
        self._variable: ContextVar[T | None] = ContextVar(name, default=None)

    def get(self) -> T | None:
        """Return the value of the request being served, None outside of requests."""
        return self._variable.get()

    @contextlib.contextmanager
    def holding(self, value: T | None) -> Iterator[None]:
        """Set the value for the context, and for tasks that begin inside."""
        token = self._variable.set(value)
        try:
            yield
        finally:
            self._variable.reset(token)
