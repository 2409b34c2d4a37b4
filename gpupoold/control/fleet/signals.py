"""Signals of live requests to the parts that look after models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, ParamSpec

from gpupoold.wire.messages import WrongAnswer

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
    """What the requests of a model show; the first argument is the model's name."""

    request_began: Signal[str] = field(default_factory=Signal)
    request_ended: Signal[str] = field(default_factory=Signal)
    weights_wanted: Signal[str] = field(default_factory=Signal)
    """A request waits until the model is warm."""
    weights_damaged: Signal[WrongAnswer] = field(default_factory=Signal)
    """A self-check has failed."""
    answered: Signal[str] = field(default_factory=Signal)
    """A request has ended well, or has got past the token at which a worker died."""
    convicted: Signal[str, str] = field(default_factory=Signal)
    """The request of this id ended a worker while it ran alone, and has been ended."""
    acquitted: Signal[str] = field(default_factory=Signal)
    """All suspects of a crash are cleared: the crash counts for the model."""
