"""Mappings of models' snapshots, dropped and attached while other models are served.

On a GPU, mapping and pinning take 0.1 s per GB and more, and unmapping takes time too: a thread
does both, and the turn loop collects the results between two steps. A load from a snapshot reads
no checkpoint, by a load format of vLLM.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.interfaces import supports_any_eagle
from vllm.model_executor.models.utils import process_eagle_weight

from gpupoold.checkpoints.tensor_file import TensorEntry, read_tensors
from gpupoold.memory.contracts import Device
from gpupoold.memory.host import HostBuffer
from gpupoold.memory.transfers import DeviceThread
from gpupoold.memory.weights import WeightMemory
from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.wire.messages import SnapshotDropped, SnapshotTaken

_logger = logging.getLogger(__name__)

SNAPSHOT_FORMAT = "gpupool-snapshot"

# Scales of quantized KV. vLLM also stores the scales as floats, which no snapshot contains. Without
# scales in the checkpoint, the initial values remain.
_KV_SCALES = frozenset(f"{prefix}{name}_scale" for prefix in ("", "_") for name in "qkv") | {
    "prob_scale"
}

# vLLM's Transformers backend, and the tensors that have no parameter there before they are loaded.
_BACKEND = "vllm.model_executor.models.transformers"
_LATE = "lm_head.bias"


class Snapshots:
    """Drops and attaches snapshots of models without requests, for the turn loop's thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._thread = DeviceThread(device, "snapshots")
        self._dropping: dict[str, Future[None]] = {}
        self._taking: dict[str, tuple[WeightMemory, Future[HostBuffer]]] = {}

    @property
    def is_busy(self) -> bool:
        """True if ``finished`` will return further results."""
        return bool(self._dropping or self._taking)

    def drop(self, model: str, weights: WeightMemory | None) -> None:
        """Evict a model's weights from the device and unmap its snapshot, if any."""
        self.forget(model)
        snapshot = (
            weights.detach_snapshot() if weights is not None and weights.has_snapshot else None
        )
        self._dropping[model] = self._thread.submit(self._close, model, snapshot)

    def take(self, model: str, weights: WeightMemory, fd: int) -> None:
        """Attach the snapshot behind ``fd`` to a model; this object owns ``fd`` from now on."""
        self.forget(model)
        if weights.has_snapshot:
            self._thread.submit(self._close, model, weights.detach_snapshot())
        taken = self._thread.submit(self._open, model, fd, weights.snapshot_bytes)
        self._taking[model] = weights, taken

    def forget(self, model: str) -> None:
        """Discard the snapshot that is being attached to a removed or changed model."""
        taking = self._taking.pop(model, None)
        if taking is not None:
            self._thread.submit(self._discard, model, taking[1])

    def finished(self) -> list[SnapshotDropped | SnapshotTaken]:
        """Return the thread's results since the last call as messages to the daemon.

        Attached snapshots belong to the models from then on.
        """
        if not (self._dropping or self._taking):
            return []
        messages: list[SnapshotDropped | SnapshotTaken] = []
        for model, dropped in list(self._dropping.items()):
            if dropped.done():
                del self._dropping[model]
                if (error := dropped.exception()) is not None:
                    _logger.error("cannot unmap the snapshot of %s: %s", model, error)
                messages.append(SnapshotDropped(model))
        for model, (weights, taken) in list(self._taking.items()):
            if taken.done():
                del self._taking[model]
                error = taken.exception()
                if error is None:
                    weights.attach_snapshot(taken.result())
                messages.append(SnapshotTaken(model, "" if error is None else str(error)))
        return messages

    def close(self) -> None:
        """End the thread; unmap snapshots without a model."""
        for model in list(self._taking):
            self.forget(model)
        self._thread.close()

    def _open(self, model: str, fd: int, num_bytes: int) -> HostBuffer:
        found_bytes = os.fstat(fd).st_size
        wanted_bytes = num_bytes * self._device.num_ranks
        if found_bytes != wanted_bytes:
            os.close(fd)
            text = f"the snapshot has {found_bytes} bytes, the weights have {wanted_bytes}"
            raise ValueError(text)
        with WORKER.beside(ThreadPhase.SNAPSHOT, model):
            snapshot = HostBuffer(fd, num_bytes)
            try:
                self._device.pin(snapshot.address, num_bytes)
                self._device.share_host(snapshot.address, num_bytes, fd)
            except BaseException:
                snapshot.close()
                raise
            return snapshot

    def _close(self, model: str, snapshot: HostBuffer | None) -> None:
        if snapshot is None:
            return
        with WORKER.beside(ThreadPhase.SNAPSHOT, model):
            try:
                self._device.unpin(snapshot.address, snapshot.num_bytes)
            finally:
                snapshot.close()

    def _discard(self, model: str, taken: Future[HostBuffer]) -> None:
        if taken.exception() is None:
            self._close(model, taken.result())


def register_snapshot_format() -> None:
    """Make the load format known to vLLM in this process.

    vLLM builds the model and post-processes zeros; then the snapshot replaces the result. The
    result is right if parameters, buffers and loose tensors contain everything that depends on the
    weights: :func:`gpupoold.worker.weights.tensors.loose_digest` detects other differences, and the
    self-check the rest.
    """
    register_model_loader(SNAPSHOT_FORMAT)(_SnapshotLoader)


class _SnapshotLoader(BaseModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: the snapshot replaces the checkpoint."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill all weights with zeros, so that post-processing meets no accidental infinities."""
        folder = Path(model_config.model)
        if type(model).__module__.startswith(_BACKEND):
            loads: Any = model  # as every model of vLLM does
            late = [one for one in _stored(folder) if one.name.endswith(_LATE)]
            loads.load_weights((one.name, torch.zeros(one.shape)) for one in late)
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                if name.rpartition(".")[2] not in _KV_SCALES:
                    tensor.zero_()
        if model_config.runner == "draft" and supports_any_eagle(model):
            for stored in _stored(folder):
                # An internal function of vLLM, which records whether a drafter has own embeddings.
                process_eagle_weight(model, stored.name)


def _stored(folder: Path) -> Iterator[TensorEntry]:
    """Yield a checkpoint's tensors, from the headers of the weight files."""
    for file in sorted(folder.glob("*.safetensors")):
        yield from read_tensors(file)
