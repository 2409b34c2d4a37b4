"""Signals from live requests to the parts that manage models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, ParamSpec

from gpupoold.wire.messages import GrammarRefused, WrongAnswer

P = ParamSpec("P")


class Signal(Generic[P]):
    """An ordered list of handlers; a call calls each handler."""

    def __init__(self) -> None:
        self._handlers: list[Callable[P, object]] = []

    def connect(self, handler: Callable[P, object]) -> None:
        self._handlers.append(handler)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for handler in self._handlers:
            handler(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Signals:
    """Events of a model's requests; the first argument of each signal is the model's name."""

    request_began: Signal[str] = field(default_factory=Signal)
    request_ended: Signal[str, int | None] = field(default_factory=Signal)
    """The device is None if no device had the request."""
    weights_wanted: Signal[str] = field(default_factory=Signal)
    """A request waits until the model is warm."""
    weights_damaged: Signal[WrongAnswer] = field(default_factory=Signal)
    """A self-check has failed."""
    grammar_refused: Signal[GrammarRefused] = field(default_factory=Signal)
    """A grammar has exceeded a bound in a worker."""
    answered: Signal[str] = field(default_factory=Signal)
    """A request has ended without an error, or has passed the token of an earlier crash."""
    convicted: Signal[str, str] = field(default_factory=Signal)
    """The request with this id crashed a worker when retried alone, and has been ended."""
    acquitted: Signal[str] = field(default_factory=Signal)
    """All suspects of a crash are cleared: the crash counts for the model."""
