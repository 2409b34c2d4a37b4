"""Loads of models on a thread beside the turns, one after the other."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gpupoold.errors import Failed, GpupoolError
from gpupoold.memory.contracts import Device
from gpupoold.memory.host import HostBuffer
from gpupoold.memory.transfers import DeviceThread
from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.wire.messages import EngineMemory, LoadModel, LoadProgress
from gpupoold.worker.device import DriverMemory
from gpupoold.worker.turn_thread import TurnThread
from gpupoold.worker.turns.model_loads import EngineLoader, Loaded

_logger = logging.getLogger(__name__)

LoadEnd = Loaded | GpupoolError | OSError
"""The result of a load, or the reason of its failure."""


class LoadCancelled(Failed):
    """The model was unloaded while being loaded."""


@dataclass(eq=False, slots=True)
class LoadOrder:
    """An order to load; ``snapshot_fd`` is -1 without a snapshot.

    ``memory`` is the memory outside the pages that the load has taken.
    """

    message: LoadModel
    snapshot_fd: int
    engine_name: str = ""
    began_s: float | None = None
    memory: EngineMemory = field(default_factory=EngineMemory)
    is_cancelled: bool = False
    on_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def model(self) -> str:
        """The model's name."""
        return self.message.model.name

    def check(self) -> None:
        """Raise LoadCancelled if the load has been cancelled."""
        if self.is_cancelled:
            raise LoadCancelled(f"{self.model} was unloaded while being loaded")

    def take_snapshot(self, num_ranks: int) -> HostBuffer | None:
        """Return the mapped part of rank 0 of the snapshot, if any, owned by the caller."""
        fd, self.snapshot_fd = self.snapshot_fd, -1
        return None if fd < 0 else HostBuffer(fd, os.fstat(fd).st_size // num_ranks)


@dataclass(eq=False)
class LoadQueue:
    """The orders to load, in order of arrival; the turn thread calls all methods.

    ``begin`` prepares a load and returns the name of the engine; ``end`` takes the result. Both run
    on the turn thread between two steps.
    """

    loader: EngineLoader
    turns: TurnThread
    device: Device
    driver_memory: DriverMemory
    begin: Callable[[LoadOrder], str]
    end: Callable[[LoadOrder, LoadEnd], None]
    _orders: list[LoadOrder] = field(default_factory=list, init=False)
    """The first is being carried out."""

    def __post_init__(self) -> None:
        self._thread = DeviceThread(self.device, "loads")

    @property
    def is_busy(self) -> bool:
        """True if a load is under way or waits."""
        return bool(self._orders)

    def add(self, message: LoadModel, snapshot_fd: int) -> None:
        """Load a model after the loads ordered before."""
        order = LoadOrder(message, snapshot_fd)
        self._orders.append(order)
        self._thread.submit(self._run, order)

    def cancel(self, model: str, on_end: Callable[[], None]) -> None:
        """Cancel all loads of a model; call ``on_end`` when none is under way."""
        orders = [order for order in self._orders if order.model == model]
        for order in orders:
            order.is_cancelled = True
        if orders:
            orders[-1].on_end.append(on_end)
        else:
            on_end()

    def progress(self, *, is_waited_for: bool = False) -> LoadProgress | None:
        """Return the state of the present load, if there is one.

        ``is_waited_for``: the present turn cannot begin, because the load has the pages.
        """
        if not self._orders or self._orders[0].began_s is None:
            return None
        order, num_waiting = self._orders[0], len(self._orders) - 1
        stage, is_held = self.loader.stage.value, self.turns.is_held or is_waited_for
        return LoadProgress(order.model, order.began_s or 0.0, stage, num_waiting, is_held)

    def _run(self, order: LoadOrder) -> None:
        with WORKER.beside(ThreadPhase.LOAD, order.model):
            try:
                end = self._load(order)
            except BaseException as error:
                _logger.exception("loading %s failed", order.model)
                self.turns.fail(error)
                threading.Event().wait()  # the process ends, while the activity page names the load
                raise
        self.turns.call(self._finish, order, end)

    def _load(self, order: LoadOrder) -> LoadEnd:
        try:
            self.turns.call(self._start, order)
            before = self.driver_memory.outside_pages()
            loaded = self.loader.load(
                order.message,
                order.take_snapshot(self.device.num_ranks),
                order.engine_name,
                order.check,
            )
            order.memory = self.driver_memory.taken_since(before)
            return loaded
        except (GpupoolError, OSError) as error:
            if not order.is_cancelled:
                _logger.exception("loading %s failed", order.model)
            return error

    def _start(self, order: LoadOrder) -> None:
        order.began_s = time.monotonic()
        order.check()
        order.engine_name = self.begin(order)

    def _finish(self, order: LoadOrder, end: LoadEnd) -> None:
        self._orders.remove(order)
        if order.snapshot_fd >= 0:
            os.close(order.snapshot_fd)
        self.end(order, end)
        for then in order.on_end:
            then()
