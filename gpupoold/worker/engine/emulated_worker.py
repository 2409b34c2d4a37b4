"""vLLM's CPU worker with weights and KV in our address ranges (vLLM's ``worker_cls`` option).

Not to be imported in a process that uses a GPU: with its CPU worker vLLM replaces torch's
streams, events and synchronisation by some that do nothing, for the whole process.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from gpupoold.worker.engine.pooled_memory import PooledMemory


class EmulatedWorker(PooledMemory, CPUWorker):
    """vLLM's CPU worker on an emulated device."""
