"""vLLM in a process: state that all engines share, and the worker classes' weights and KV in pages.

The process groups are made once per process, for every kind of model.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers import rotary_embedding, vocab_parallel_embedding
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample import sampler
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu.sample import prompt_logprob
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from gpupoold.errors import GpupoolError
from gpupoold.memory.group.link import OrderBook
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.worker.engine.configuration import parallel_arguments, refusal
from gpupoold.worker.engine.families import share_compiled_code
from gpupoold.worker.engine.late_graphs import LateGraphs
from gpupoold.worker.engine.layer_gates import LayerGates
from gpupoold.worker.process import set_group_environment
from gpupoold.worker.threads import HEAP, TurnThread, use_load_threads
from gpupoold.worker.weights.loading import ModelLoad, current_load, register_snapshot_format
from gpupoold.worker.weights.rank_loads import LeaderLoad
from gpupoold.worker.weights.stages import LoadStage, replaced

MAX_ROWS = 128
"""Prompt tokens of a request whose logits exist at one time."""

_Compute = Callable[[Any, torch.Tensor, dict[str, int]], dict[str, Any]]
_SEED_BITS = 62
_SHARED_MEMORY = Path("/dev/shm")

_init_method = ""


def distributed_init_method() -> str:
    """Return how the ranks of this process's group have found each other."""
    return _init_method


def join_group(store: Path, rank: int, num_ranks: int, *, may_spin: bool = True) -> None:
    """Make the process groups of a group; ``store`` is an empty file that all ranks open.

    Returns when all ranks have called. Ranks on the CPU wait for each other in shared memory if
    they ``may_spin``, else in sockets: a rank that spins keeps another rank from its core.
    """
    global _init_method
    _init_method = f"file://{store}"
    # Part of the name of the shared memory; ranks with different names use sockets.
    leader = os.getppid() if rank else os.getpid()
    os.environ["VLLM_DIST_IDENT"] = f"gpupool-{leader}" + ("" if may_spin else f"-{rank}")
    set_group_environment()
    _ensure(_init_method, rank, num_ranks, local_rank=rank)
    copy_in_captures()
    if rank == 0:  # vLLM removes the names at an orderly end only
        for file in _SHARED_MEMORY.glob(f"gpupool-{leader}-*"):
            file.unlink()


def ensure_process_groups(init_method: str, local_rank: int) -> None:
    """Create groups of one rank, unless there are groups."""
    if not parallel_state.model_parallel_is_initialized():
        _ensure(init_method, 0, 1, local_rank)


def _ensure(init_method: str, rank: int, num_ranks: int, local_rank: int) -> None:
    """Create groups for every kind of model.

    vLLM creates the groups for the first model of a process, without the expert group if that model
    is dense; without any model vLLM creates all groups.
    """
    if current_platform.is_cuda():
        current_platform.set_device(torch.device(f"cuda:{local_rank}"))
    parallel = ParallelConfig(**parallel_arguments(num_ranks))
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        parallel_state.init_distributed_environment(
            world_size=num_ranks,
            rank=rank,
            distributed_init_method=init_method,
            local_rank=local_rank,
            backend=current_platform.dist_backend,
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=num_ranks)


def copy_in_captures() -> None:
    """Let captured all-reduces copy their input into vLLM's buffer, which all ranks have open.

    vLLM would open the memory of each captured input on all ranks by ``cudaIpcGetMemHandle``. These
    handles are never closed, although the memory is freed with the engine: undefined for CUDA. The
    table of 65,536 inputs would be full after some ten loads, because no entry is freed. And no
    handle exists for memory of ``cuMemCreate``, such as torch's expandable segments. Weights and KV
    are in such memory, but are no input of an all-reduce. vLLM itself copies in captures if graphs
    are in its cuMem pool.

    vLLM assumes one model per process, whose CUDA graphs live as long as the process. Here engines
    come and go, and step while another engine captures graphs.
    """
    custom = _custom_all_reduce()
    if custom is not None:
        custom._capture_registered = False  # a parameter of the constructor, which vLLM calls


@contextlib.contextmanager
def between_captures() -> Iterator[None]:
    """Let other engines step inside of this context, in the middle of a capture of graphs.

    vLLM marks its all-reduce as capturing from the first to the last graph. Outside of a graph a
    marked all-reduce returns memory without a result, because only warm-ups are expected there.
    """
    custom = _custom_all_reduce()
    if custom is None:
        yield
        return
    was_capturing = custom._IS_CAPTURING
    custom._IS_CAPTURING = False
    try:
        yield
    finally:
        custom._IS_CAPTURING = was_capturing


def _custom_all_reduce() -> Any:
    """Return vLLM's ``CustomAllreduce`` of the group; None on single GPUs and on the CPU."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    communicator = parallel_state.get_tp_group().device_communicator
    return getattr(communicator, "ca_comm", None)


def seed_sampling(seed: int) -> None:
    """Set the state of torch's generators before a step samples.

    Every rank samples, from equal logits. Requests without a seed draw from torch's generator of
    the process, whose state depends on all engines. So the leader seeds each sampling.
    """
    torch.manual_seed(seed)


def keep_generators() -> None:
    """Keep vLLM's loads, which run beside steps, from seeding the generators of the process."""
    # The CPU worker's module must not be imported for a GPU, see ``emulated_worker``.
    name = "gpu_worker" if current_platform.is_cuda() else "cpu_worker"
    module = importlib.import_module(f"vllm.v1.worker.{name}")
    setattr(module, "set_random_seed", lambda *_: None)  # noqa: B010


def whole_model(runner: Any) -> nn.Module:
    """Return a runner's model, together with the drafter's model if there is one.

    Modules that both share, such as embeddings, occur once in the result.
    """
    model: nn.Module = runner.get_model()
    draft: nn.Module | None = runner.get_draft_model()
    return model if draft is None else nn.ModuleList([model, draft])


def drop_runner(runner: Any) -> None:
    """Drop a runner's model and caches, and what vLLM keeps of the model for the process."""
    runner.compilation_config.static_forward_context.clear()
    if getattr(runner, "model", None) is not None:
        forget_compiled(whole_model(runner))
    for holder in ("model", "drafter", "speculator"):  # the drafter's holder by model runner
        if hasattr(runner, holder):
            setattr(runner, holder, None)
    runner.kv_caches.clear()


def forget_compiled(model: nn.Module) -> None:
    """Remove the hooks that vLLM registers with the compiler for each compiled module.

    The hooks are in a list of the process, which keeps the module alive with its code and CUDA
    graphs. vLLM does not remove the hooks.
    """
    for module in model.modules():
        if isinstance(module, TorchCompileWithNoGuardsWrapper):
            module.cleanup()


def start_load(*, skips_checkpoint: bool) -> None:
    """Prepare this process for building another engine."""
    use_load_threads()
    if skips_checkpoint:
        register_snapshot_format()
    # Not public: vLLM shares rotary modules through this cache. A relocated buffer of one model
    # must not appear in another model.
    rotary_embedding._ROPE_DICT.clear()
    HEAP.freeze()


@contextlib.contextmanager
def tracing_alone(turns: TurnThread) -> Iterator[None]:
    """Keep engines from stepping while a model is traced inside the context.

    vLLM traces the modules of Transformers to replace parts of them. Meanwhile torch's tracer
    replaces the call of modules in the whole process, so that a step of another model would fail.

    A step traces too if a function is compiled in it. Its thread cannot wait for itself: on a group
    the leader's order to wait would stop the followers, whose next step the leader waits for.
    """
    trace, loader = fx.Tracer.trace, threading.get_ident()

    def trace_alone(tracer: fx.Tracer, *arguments: Any, **options: Any) -> fx.Graph:
        is_step = threading.get_ident() != loader
        with contextlib.nullcontext() if is_step else turns.held():
            return trace(tracer, *arguments, **options)

    with replaced(fx.Tracer, "trace", trace_alone):
        yield


class RankExecutor(UniProcExecutor):
    """vLLM's executor of a group's leader: the own worker here, the followers' by messages.

    During a load a call waits for the answers of all ranks. Later the followers carry out calls in
    the order of the leader's other orders, and only the leader's result counts.
    """

    def _init_executor(self) -> None:
        load = current_load()
        assert isinstance(load, LeaderLoad), "a group loads with LeaderLoad"
        self._load = load
        self._engine = load.engine
        self._orders: OrderBook = load.links.orders
        self._seed: int | None = None  # of the sampling that was ordered with its step
        load.links.send("build", self._engine, self.vllm_config)
        super()._init_executor()
        load.links.receive()

    def _distributed_args(self) -> tuple[str, int, int]:
        return distributed_init_method(), 0, 0

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        super().initialize_from_config(kv_cache_configs)
        self._load.share_kv()

    def overwrite(self, span: range) -> None:
        """Order the followers to overwrite bytes of their weights, as ``tensors.spoil`` does."""
        self._orders.send("overwrite", self._engine, span)

    def close_engine(self) -> None:
        """Order the followers to free their shards."""
        self._orders.send("close_engine", self._engine)

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Call a method of the workers; return the leader's result, in a load all results."""
        assert isinstance(method, str), "followers are called by name"
        call = (self._engine, method, args, kwargs or {})
        if not self._load.is_under_way:
            if method == "execute_model":
                self._order_step(args[0])
            elif method == "sample_tokens":
                self._order_sampling(args[0])
            else:
                self._orders.send("on_shard", self._engine, "call", *call[1:])
            return super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
        self._load.links.send("call", *call)
        [own] = super().collective_rpc(method, timeout, args, kwargs)
        others = self._load.links.receive()
        return own if single_value else [own, *others]

    def _order_step(self, output: SchedulerOutput) -> None:
        """Order a step; with its sampling, unless this has to wait for the bits of grammars."""
        has_grammars = output.has_structured_output_requests
        self._seed = None if has_grammars else random.getrandbits(_SEED_BITS)
        self._orders.send("step", self._engine, output, self._seed)

    def _order_sampling(self, grammars: GrammarOutput | None) -> None:
        """Order the sampling of a step, unless ordered with the step; seed this rank's."""
        if self._seed is None:
            seed = random.getrandbits(_SEED_BITS)
            self._orders.send("sample", self._engine, grammars, seed)
        else:
            assert grammars is None, "a step without grammars has bits of grammars"
            seed, self._seed = self._seed, None
        seed_sampling(seed)


class ResumedRequest(NamedTuple):
    """What the worker of each rank needs for its record of a request."""

    request_id: str
    prompt_token_ids: list[int]
    mm_features: list[Any]
    sampling_params: SamplingParams | None
    lora_request: LoRARequest | None
    output_token_ids: list[int]


class PooledMemory:
    """A mixin before vLLM's worker that replaces the three allocations of device memory."""

    model_runner: Any
    model_config: ModelConfig
    vllm_config: VllmConfig
    local_rank: int
    distributed_init_method: str
    gates: LayerGates | None = None
    """Set for a model whose steps may begin before all weights are present."""
    graphs: LateGraphs | None = None
    """Set for an engine that may capture CUDA graphs after its load."""

    def init_device(self) -> None:
        """Create the process groups that all models share, then initialise as vLLM does."""
        bound_logprobs()
        keep_from_compiling()
        ensure_process_groups(self.distributed_init_method, self.local_rank)
        super().init_device()  # type: ignore[misc]

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load as vLLM does, then move the weights into the model's address range."""
        load = current_load()
        with _reading(load, self.vllm_config):
            super().load_model(load_dummy_weights=load_dummy_weights)  # type: ignore[misc]
        with load.stages.during(LoadStage.SNAPSHOT):
            load.take_weights(whole_model(self.model_runner))
        assert load.layout is not None
        share_compiled_code(self.vllm_config, load.layout.digest)

    def determine_available_memory(self) -> int:
        """Return the KV budget of a model alone on the device: all memory without the weights."""
        specs = self.model_runner.get_kv_cache_spec().values()
        return current_load().kv_budget_bytes([spec.page_size_bytes for spec in specs])

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run a step as vLLM does; drop the hidden states of pooling requests that begin anew.

        vLLM's first model runner keeps the hidden states of earlier chunks across a preemption, and
        would return a prompt's first tokens twice.
        """
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            record = getattr(self.model_runner, "requests", {}).get(request_id)
            states = getattr(record, "pooling_states", None)
            if states is not None:
                states.clean()
        gates = self.gates
        if gates is None or gates.are_open or not scheduler_output.total_num_scheduled_tokens:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        with gates.closed(scheduler_output):
            return super().execute_model(scheduler_output)  # type: ignore[misc]

    def add_record(self, request: ResumedRequest) -> None:
        """Record a request that continues here after tokens."""
        self.model_runner.requests[request.request_id] = new_record(self.model_runner, request)

    def drop_record(self, request_id: str) -> None:
        """Drop the record of a request that is not queued after all."""
        del self.model_runner.requests[request_id]

    def _maybe_get_memory_pool_context(self, tag: str) -> contextlib.AbstractContextManager[Any]:
        if tag == "kv_cache":
            return current_load().kv_allocation()
        return contextlib.nullcontext()


@contextlib.contextmanager
def _reading(load: ModelLoad, config: VllmConfig) -> Iterator[None]:
    reads = load.stages.during_calls(LoadStage.READ, DefaultModelLoader, "load_weights")
    with reads, load.reading(config), tracing_alone(load.turns):
        yield


def make_snapshot(name: str, load: ModelLoad, config: VllmConfig) -> HostBuffer:
    """Read a model without building an engine; return its snapshot, which the caller owns.

    Raises:
        GpupoolError: the checkpoint cannot be served here, with vLLM's reason.
    """
    start_load(skips_checkpoint=False)
    with load.active():
        try:
            with _reading(load, config), set_current_vllm_config(config):
                model = get_model(vllm_config=config)
            with load.stages.during(LoadStage.SNAPSHOT):
                snapshot = load.take_snapshot(model)
        except GpupoolError:
            raise
        except Exception as error:
            raise refusal(name, error) from error
    config.compilation_config.static_forward_context.clear()
    forget_compiled(model)
    del model
    load.end_without_engine()
    return snapshot


def keep_from_compiling() -> None:
    """Run two small functions of vLLM as they are written; again has no effect.

    vLLM compiles each when a step first calls it, and again when a load has changed the default
    dtype of the process: all steps wait, for 5 s where the code is in no cache. The functions are
    the count of ranks of log-probabilities, and the choice of a rank's rows of the embedding.
    """
    sampler.batched_count_greater_than = count_not_less
    masked_input = vocab_parallel_embedding.get_masked_input_and_mask
    vocab_parallel_embedding.get_masked_input_and_mask = inspect.unwrap(masked_input)


def bound_logprobs() -> None:
    """Change both of vLLM's model runners; again has no effect.

    Its first runner takes the logits of all prompt tokens of a step in one piece, 3 GB for 2,048
    tokens of a vocabulary of 152,000, which no profiling run has seen.
    """
    prompt_logprob.CHUNK_SIZE = MAX_ROWS
    runner = gpu_model_runner.GPUModelRunner
    if not hasattr(runner._get_prompt_logprobs_dict, "__wrapped__"):
        runner._get_prompt_logprobs_dict = _in_slices(runner._get_prompt_logprobs_dict)


def count_not_less(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return for each row of ``x`` (rows, columns) how many numbers are at least the row's of
    ``values`` (rows, 1)."""
    return (x >= values).sum(-1)


def _in_slices(compute: _Compute) -> _Compute:
    """Return vLLM's function for a step's prompts, called for ``MAX_ROWS`` tokens at a time.

    vLLM finds a request's tokens by how many are computed, and its rows in ``hidden_states`` from
    the request's first row on.
    """

    @functools.wraps(compute)
    def in_slices(
        self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for request_id in self.num_prompt_logprobs.keys() & num_scheduled_tokens.keys():
            request, num_tokens = self.requests[request_id], num_scheduled_tokens[request_id]
            num_computed = request.num_computed_tokens
            for first in range(0, num_tokens, MAX_ROWS):
                request.num_computed_tokens = num_computed + first
                num_in_slice = min(MAX_ROWS, num_tokens - first)
                found |= compute(self, hidden_states[first:], {request_id: num_in_slice})
            request.num_computed_tokens = num_computed
        return found

    return in_slices


def new_record(runner: Any, request: ResumedRequest) -> CachedRequestState:
    """Return the record that ``runner`` would have of a preempted request."""
    num_drawn = len(request.output_token_ids)
    record = CachedRequestState(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=request.mm_features,
        sampling_params=request.sampling_params,
        generator=_generator(runner, request.sampling_params, num_drawn),
        block_ids=([],) * len(runner.kv_cache_config.kv_cache_groups),
        num_computed_tokens=0,
        output_token_ids=list(request.output_token_ids),
        lora_request=request.lora_request,
    )
    if runner.uses_mrope:  # positions in images, as for a new request
        runner._init_mrope_positions(record)
    return record


def _generator(
    runner: Any, sampling: SamplingParams | None, num_drawn: int
) -> torch.Generator | None:
    """Return the generator of a seeded request after ``num_drawn`` tokens.

    vLLM's own sampler draws the tokens, because the consumption of random numbers differs between
    devices.
    """
    if sampling is None or sampling.sampling_type != SamplingType.RANDOM_SEED:
        return None
    assert sampling.seed is not None
    generator = torch.Generator(device=runner.device)
    generator.manual_seed(sampling.seed)
    size = runner.input_batch.vocab_size
    for _ in range(num_drawn):
        logits = torch.zeros(1, size, device=runner.device)
        runner.sampler.topk_topp_sampler(logits, {0: generator}, None, None)
    return generator
