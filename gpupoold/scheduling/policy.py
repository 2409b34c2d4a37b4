"""What a device's scheduling policy must offer: the same for the daemon and the simulator."""

from __future__ import annotations

from typing import Protocol

from gpupoold.domain import Targets
from gpupoold.scheduling.turns import SwitchCost, Turn


class DevicePolicy(Protocol):
    """Decides which model runs next on one device, and for how long.

    Times are seconds of any one monotonic clock. Implementations do no I/O and
    read no clock.
    """

    def add_model(self, model: str, targets: Targets) -> None:
        """A model can be scheduled from now on."""

    def arrive(self, model: str, request_id: str, arrival_s: float) -> None:
        """A request came in."""

    def progress(self, model: str, request_id: str, num_tokens: int) -> None:
        """A request gained tokens."""

    def finish(self, model: str, request_id: str) -> None:
        """A request ended, whatever the reason."""

    def observe_step(self, model: str, step_s: float) -> None:
        """A decode step of the model took ``step_s``."""

    def num_live(self, model: str) -> int:
        """Requests of the model that have not ended."""

    def next_deadline_s(self, model: str) -> float:
        """The earliest deadline among the model's requests; infinity without any."""

    def working_models(self) -> list[str]:
        """Models that have requests."""

    def next_turn(self, now_s: float, cost: SwitchCost) -> Turn | None:
        """The next turn, or None without work."""

    def turn_is_over(self, turn: Turn, now_s: float) -> bool:
        """Whether to give the device away."""

    def upcoming(self) -> str | None:
        """The model whose turn comes next as far as is known: the one to prefetch."""
