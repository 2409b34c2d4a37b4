"""vLLM's CPU worker with weights and KV in gpupool's address ranges (vLLM's ``worker_cls``).

Not for a process that uses a GPU: vLLM's CPU worker replaces torch's streams, events and
synchronisation by dummies in the whole process.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_worker import CPUWorker

from gpupoold.worker.engine import masked_adapters
from gpupoold.worker.engine.pooled_memory import PooledMemory


class EmulatedWorker(PooledMemory, CPUWorker):
    """vLLM's CPU worker on an emulated device."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load with adapters that leave requests for the base model unchanged."""
        CpuPlatform.get_punica_wrapper = classmethod(  # type: ignore[method-assign]
            lambda _: f"{masked_adapters.__name__}.MaskedAdapters"
        )
        super().load_model(load_dummy_weights=load_dummy_weights)
