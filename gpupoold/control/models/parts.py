"""What all operations on models use."""

from __future__ import annotations

from dataclasses import dataclass

from gpupool_state import History, Registry
from gpupoold.config.schema import Settings
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.workers import WorkerSupervisor


@dataclass(frozen=True, slots=True)
class ControlParts:
    """The parts of the control plane below the models."""

    settings: Settings
    registry: Registry
    history: History
    fleet: Fleet
    dispatcher: Dispatcher
    supervisor: WorkerSupervisor


class ModelPart:
    """A part that manages models, with the parts below by name."""

    def __init__(self, parts: ControlParts) -> None:
        self._settings = parts.settings
        self._registry = parts.registry
        self._history = parts.history
        self._fleet = parts.fleet
        self._dispatcher = parts.dispatcher
        self._supervisor = parts.supervisor
