"""Handlers of the events of supervised processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gpupoold.control.processes.crash_attribution import Death

P = TypeVar("P")
M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class ProcessHandlers(Generic[P, M]):
    """Handlers for processes ``P`` that send messages ``M``.

    ``on_message`` gets the messages that do not concern the process itself. ``on_up`` sets a new
    process up for its work; if ``on_up`` raises, the process is killed. ``on_down`` is called after
    the end of each process, also if ``on_up`` has not returned.
    """

    on_message: Callable[[P, M], None]
    on_up: Callable[[P], Awaitable[None]]
    on_down: Callable[[P, Death], Awaitable[None]]
