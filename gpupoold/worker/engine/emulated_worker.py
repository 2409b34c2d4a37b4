"""vLLM's CPU worker with weights and KV in gpupool's address ranges (vLLM's ``worker_cls``).

Not for a process that uses a GPU: vLLM's CPU worker replaces torch's streams, events and
synchronisation by dummies in the whole process.
"""

from __future__ import annotations

from dataclasses import replace

from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from gpupoold.worker.engine.pooled_memory import PooledMemory


class EmulatedWorker(PooledMemory, CPUWorker):
    """vLLM's CPU worker on an emulated device."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return vLLM's specifications, without checkpoints of Mamba states inside a prefill.

        vLLM's CPU kernel of Mamba 2 cannot return such a state and fails. Without checkpoints the
        scheduler ends a prefill chunk where a state is cached.
        """
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()
        return {
            layer: replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)
            if isinstance(spec, MambaSpec)
            else spec
            for layer, spec in specs.items()
        }
