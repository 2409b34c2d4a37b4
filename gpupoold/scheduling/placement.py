"""On which device a request runs. Pure: a view of the devices in, a choice out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device as placement sees it: models with live requests, and models resident."""

    device: int
    num_live: int
    working: frozenset[str]
    resident: frozenset[str]


class Placement(Protocol):
    """Chooses a device, or None to let the request wait until a device changes."""

    def choose(self, model: str, devices: Sequence[DeviceView]) -> int | None:
        """The device for a request of ``model``; ``devices`` are those that may serve it."""


class StickyPlacement:
    """Where the model works already; else on the least busy device, among equals at home.

    Busy is counted in models, not requests: a further request of a model that is
    served anyway joins its batch, a further model makes every round longer. Home is
    where the model was last, and its weights may still be. Going home even where that
    is a model busier was tried in the simulator: no gain on 16 devices, a loss on 2.
    """

    def __init__(self) -> None:
        self._home: dict[str, int] = {}

    def choose(self, model: str, devices: Sequence[DeviceView]) -> int | None:
        """See :class:`Placement`; never None while there is a device."""
        if not devices:
            return None
        serving = [view for view in devices if model in view.working]
        if serving:
            chosen = min(serving, key=lambda view: (view.num_live, view.device))
        else:
            chosen = min(devices, key=lambda view: self._rank(view, model))
        self._home[model] = chosen.device
        return chosen.device

    def _rank(self, view: DeviceView, model: str) -> tuple[int, bool, bool, int, int]:
        is_away = view.device != self._home.get(model)
        return (
            len(view.working),
            is_away,
            model not in view.resident,
            view.num_live,
            view.device,
        )


class WholeDevicePlacement:
    """Request-level serving: the device that serves the model, else an idle one, else wait."""

    def choose(self, model: str, devices: Sequence[DeviceView]) -> int | None:
        """See :class:`Placement`."""
        serving = [view for view in devices if model in view.working]
        if serving:
            return min(serving, key=lambda view: (view.num_live, view.device)).device
        idle = [view for view in devices if not view.working]
        if not idle:
            return None
        return min(idle, key=lambda view: (model not in view.resident, view.device)).device
