"""The common part of gpupool's worker classes: weights and KV in address ranges."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample import sampler
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu.sample import prompt_logprob
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from gpupoold.worker.engine.layer_gates import LayerGates
from gpupoold.worker.engine.process_state import ensure_process_groups, whole_model
from gpupoold.worker.weights.loading import current_load

MAX_ROWS = 128
"""Prompt tokens of a request whose logits exist at one time."""

_Compute = Callable[[Any, torch.Tensor, dict[str, int]], dict[str, Any]]


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
    local_rank: int
    distributed_init_method: str
    gates: LayerGates | None = None
    """Set for a model whose steps may begin before all weights are present."""

    def init_device(self) -> None:
        """Create the process groups that all models share, then initialise as vLLM does."""
        bound_logprobs()
        ensure_process_groups(self.distributed_init_method, self.local_rank)
        super().init_device()  # type: ignore[misc]

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load as vLLM does, then move the weights into the model's address range."""
        super().load_model(load_dummy_weights=load_dummy_weights)  # type: ignore[misc]
        current_load().take_weights(whole_model(self.model_runner))

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


def bound_logprobs() -> None:
    """Change both of vLLM's model runners; again has no effect.

    vLLM compiles its count of ranks at the first request with log-probabilities: all steps of the
    process wait for 5 s. Its first runner also takes the logits of all prompt tokens of a step in
    one piece, 3 GB for 2,048 tokens of a vocabulary of 152,000, which no profiling run has seen.
    """
    sampler.batched_count_greater_than = count_not_less
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
