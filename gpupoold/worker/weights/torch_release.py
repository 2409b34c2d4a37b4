"""Release of device memory to torch while vLLM loads a model.

vLLM builds a model in torch's memory before its weights move into gpupool's pages. On a GPU all
memory except a small reserve is pages, so the pages needed for the weights are released to torch
during the load and reclaimed afterwards. On an emulated device torch uses host memory, but a load
takes as many pages from the models as on a GPU.
"""

from __future__ import annotations

import gc
import traceback
from pathlib import Path

import torch

from gpupoold.checkpoints.adapter_check import estimate_slot_bytes
from gpupoold.checkpoints.check import check_checkpoint
from gpupoold.checkpoints.fit import estimate_weight_bytes, model_dtype_bits
from gpupoold.engine_options.adapter_support import max_rank, num_slots
from gpupoold.memory.contracts import Device, PageRun
from gpupoold.memory.pages import PagePool
from gpupoold.wire.messages import ModelToLoad

# Memory beyond the weights, besides the device's ``load_slack_bytes``.
_SLACK_SHARE = 0.1


def pages_for_torch(model: ModelToLoad, device: Device, snapshot_bytes: int = 0) -> int:
    """Return the pages to release to torch for loading ``model``.

    ``snapshot_bytes`` are the bytes of the weights where the load does not read the checkpoint.
    """
    path = Path(model.path)
    weight_bytes = snapshot_bytes or _estimate_bytes(model, path)
    if num := num_slots(model.engine):
        bits = model_dtype_bits(model.dtype)
        weight_bytes += estimate_slot_bytes(path, max_rank(model.engine), num, bits)
    num_bytes = int(weight_bytes * (1 + _SLACK_SHARE)) + device.load_slack_bytes
    return min(device.num_pages, -(-num_bytes // device.page_bytes))


def _estimate_bytes(model: ModelToLoad, path: Path) -> int:
    info = check_checkpoint(path, allow_pickle=True, allow_remote_code=model.allow_remote_code)
    return estimate_weight_bytes(info, model.dtype, model.engine)


class TorchRelease:
    """Pages released to torch; ``reclaim`` reclaims the pages and may be called at any time."""

    def __init__(self, device: Device, pool: PagePool) -> None:
        self._device = device
        self._pool = pool
        self._runs: list[PageRun] = []

    @property
    def has_pages(self) -> bool:
        """True if torch has pages."""
        return bool(self._runs)

    def release(self, num_pages: int) -> None:
        """Release ``num_pages`` to torch, or all free pages if fewer."""
        assert not self._runs, "the pages released before have not been reclaimed"
        runs = self._pool.allocate(min(num_pages, self._pool.num_free))
        self._device.release_memory(runs)
        self._runs = runs

    def drop_garbage(self, failure: BaseException | None = None) -> None:
        """Free the garbage of the load in torch's memory, before ``reclaim``.

        The frames of ``failure`` keep a failed load's tensors alive and are cleared.
        """
        if failure is not None:
            _clear_frames(failure)
        gc.collect()  # without the objects from before the load, which are frozen
        torch.cuda.empty_cache()

    def reclaim(self) -> None:
        """Reclaim the pages.

        Raises:
            CudaError: torch still has the memory; the worker should be restarted.
        """
        if not self._runs:
            return
        self._device.reclaim(self._runs)
        self._pool.free(self._runs)
        self._runs = []


def _clear_frames(error: BaseException) -> None:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        waiting += [current.__cause__, current.__context__]
