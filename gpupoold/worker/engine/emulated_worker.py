"""vLLM's CPU worker with weights and KV in gpupool's address ranges (vLLM's ``worker_cls``).

Not for a process that uses a GPU: vLLM's CPU worker replaces torch's streams, events and
synchronisation by dummies in the whole process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from gpupoold.worker.engine.cpu_build import MaskedAdapters, check_first_inputs
from gpupoold.worker.engine.vllm_process import PooledMemory
from gpupoold.worker.weights.loading import current_load


class EmulatedWorker(PooledMemory, CPUWorker):
    """vLLM's CPU worker on an emulated device."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return vLLM's specs, with states stored only at the end of a step.

        vLLM's Mamba 2 mixer also stores the state at a block boundary inside a prefill, for the
        prefix cache. The CPU kernel returns no such states, so the prefill fails with an IndexError
        (``mamba_mixer2.py``). Without checkpoint blocks the scheduler ends a step at the boundary.
        """
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()
        return {
            name: replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)
            if isinstance(spec, MambaSpec)
            else spec
            for name, spec in specs.items()
        }

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load with adapters that leave requests for the base model unchanged.

        The first call of each attention layer checks the layer's inputs.
        """
        CpuPlatform.get_punica_wrapper = classmethod(  # type: ignore[method-assign]
            lambda _: f"{MaskedAdapters.__module__}.{MaskedAdapters.__qualname__}"
        )
        self._device = current_load().device
        super().load_model(load_dummy_weights=load_dummy_weights)
        layers = self.model_runner.compilation_config.static_forward_context
        check_first_inputs(current_load().name, layers)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run a step, whose launches a modelled driver may delay."""
        self._device.wait_for_driver()
        return super().execute_model(scheduler_output)
