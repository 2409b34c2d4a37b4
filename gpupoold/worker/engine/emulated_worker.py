"""vLLM's CPU worker with weights and KV in gpupool's address ranges (vLLM's ``worker_cls``).

Not for a process that uses a GPU: vLLM's CPU worker replaces torch's streams, events and
synchronisation by dummies in the whole process.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from gpupoold.worker.engine.pooled_memory import PooledMemory


class EmulatedWorker(PooledMemory, CPUWorker):
    """vLLM's CPU worker on an emulated device."""
