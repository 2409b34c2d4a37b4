"""vLLM's CUDA worker with weights and KV in gpupool's address ranges (vLLM's ``worker_cls``)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu_worker import Worker

from gpupoold.worker.engine.late_graphs import LateGraphs
from gpupoold.worker.engine.vllm_process import PooledMemory, between_captures
from gpupoold.worker.threads import TurnThread, use_step_threads
from gpupoold.worker.weights.loading import current_load
from gpupoold.worker.weights.stages import LoadStage, replaced


class CudaWorker(PooledMemory, Worker):
    """vLLM's CUDA worker on a device whose pages belong to gpupool.

    Unlike vLLM's CPU worker, the CUDA worker runs the model during the load, to compile, tune
    kernels and capture CUDA graphs. Weights and KV must be mapped meanwhile.
    """

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load, move the weights into the address range and make them resident if necessary."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        use_step_threads()
        with current_load().stages.during(LoadStage.SNAPSHOT):
            current_load().bring_weights()

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Return vLLM's layouts, beginning with layouts whose blocks are outermost.

        A block is then contiguous: the least KV of a model is one page instead of a page per layer,
        and copies are long.
        ``VLLM_KV_CACHE_LAYOUT`` takes precedence.
        """
        names = super().get_supported_kv_cache_layouts()
        return sorted(names, key=lambda name: not KVCacheLayout[name].is_block_outermost)

    def determine_available_memory(self) -> int:
        """Return the KV budget after vLLM's profiling run, during which steps wait.

        The run compiles, and fails if activations exceed the reserve. vLLM takes the budget as
        given and measures nothing.
        """
        self.cache_config.kv_cache_memory_bytes = super().determine_available_memory()
        load = current_load()
        with load.stages.during(LoadStage.COMPILE), load.weight_scratch(), self._running_alone():
            num_bytes = int(Worker.determine_available_memory(self))
            torch.cuda.synchronize()
        return num_bytes

    def compile_or_warm_up_model(self) -> Any:
        """Warm up and capture graphs with every KV block readable and writable.

        Steps run between two runs of the model, and between the captures of two sizes.
        """
        load = current_load()
        with (
            load.stages.during(LoadStage.COMPILE),
            load.stages.during_calls(LoadStage.CAPTURE, self.model_runner, "capture_model"),
            load.kv_scratch(),
            load.weight_scratch(),
            self._running_alone(),
            self._capturing_few(),
        ):
            times = super().compile_or_warm_up_model()
            # vLLM captures graphs, and runs code between two graphs, on separate streams. The
            # device does not wait for these streams before it unmaps pages.
            torch.cuda.synchronize()
        return times

    @contextlib.contextmanager
    def _running_alone(self) -> Iterator[None]:
        """Keep other engines from stepping, except between two runs of this worker's model."""
        turns, runner = current_load().turns, self.model_runner
        run = runner._dummy_run  # the name in both model runners

        def run_after_steps(*arguments: Any, **options: Any) -> Any:
            _let_steps_run(turns)
            return run(*arguments, **options)

        with (
            replaced(runner, "_dummy_run", run_after_steps),
            _steps_between_captures(turns),
            turns.held(),
        ):
            yield

    @contextlib.contextmanager
    def _capturing_few(self) -> Iterator[None]:
        """Let vLLM capture few sizes inside the context, and keep the capture of the others.

        All sizes are captured at once with adapters, whose capture uses the adapters' slots, with a
        drafter, on groups, and for models with further graphs of their own.
        """
        runner, capture = self.model_runner, ModelCudaGraphManager.capture
        if (
            self.vllm_config.lora_config is not None
            or self.vllm_config.speculative_config is not None
            or self.vllm_config.parallel_config.world_size > 1
        ):
            yield
            return

        def capture_few(manager: Any, *arguments: Any, **options: Any) -> None:
            capture_all = functools.partial(capture, manager, *arguments, **options)
            if type(runner.model_state).capture_inner_cudagraphs is not _NO_INNER:
                capture_all()
                return
            self.graphs = LateGraphs(manager, capture_all)
            self.graphs.capture_first()

        with replaced(ModelCudaGraphManager, "capture", capture_few):
            yield


_NO_INNER = ModelState.capture_inner_cudagraphs


@contextlib.contextmanager
def _steps_between_captures(turns: TurnThread) -> Iterator[None]:
    """Let other engines step before each size that is captured inside the context.

    Graphs of models and of drafters are captured by ``capture`` of a common base class of vLLM's,
    whose first argument prepares one size. One engine is built at a time.
    """
    capture = CudaGraphManager.capture

    def capture_between_steps(
        manager: CudaGraphManager, create_forward: Any, *arguments: Any, **options: Any
    ) -> Any:
        def create_after_steps(*given: Any, **named: Any) -> Any:
            _let_steps_run(turns)
            return create_forward(*given, **named)

        return capture(manager, create_after_steps, *arguments, **options)

    with replaced(CudaGraphManager, "capture", capture_between_steps):
        yield


def _let_steps_run(turns: TurnThread) -> None:
    """Let other engines step now; restore the state of vLLM that steps change."""
    own_workspace = workspace._manager  # one per process, and in the addresses of graphs
    with between_captures():
        turns.give_way()
    workspace._manager = own_workspace
