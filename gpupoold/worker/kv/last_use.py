"""The last kernels of each paused model, after which its pages may be unmapped."""

from __future__ import annotations

from gpupoold.memory.contracts import Device, Fence
from gpupoold.worker.kv.page_eviction import PooledModel


class LastUses:
    """A fence per model, recorded when another model runs.

    The pages of a paused model are unmapped after the model's own last kernels, without a wait for
    the kernels of the running model.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._running: PooledModel | None = None
        self._fences: dict[str, Fence] = {}

    def add(self, model: PooledModel) -> None:
        """Add a model, which may launch kernels until another model runs."""
        self._fences[model.name] = self._device.open_fence()

    def remove(self, model: PooledModel) -> None:
        """Remove a model."""
        _set(model, None)
        self._fences.pop(model.name).close()
        if self._running is model:
            self._running = None

    def run(self, model: PooledModel) -> None:
        """Let ``model`` launch kernels; no other model launches any until its own ``run``."""
        before, self._running = self._running, model
        if before is model:
            return
        if before is not None:
            self._paused(before)
        _set(model, None)

    def pause(self, model: PooledModel) -> None:
        """Record that ``model`` launches no kernels until its own ``run``."""
        if self._running is model:
            self._running = None
            self._paused(model)

    def _paused(self, model: PooledModel) -> None:
        fence = self._fences[model.name]
        fence.record()
        _set(model, fence)


def _set(model: PooledModel, last_use: Fence | None) -> None:
    model.kv.set_last_use(last_use)
    model.weights.set_last_use(last_use)
