"""The only importer of vLLM's engine: one in-process ``EngineCore`` per model.

Seams used (``scripts/vllm_seams``): ``worker_cls``, ``scheduler_cls``, ``EngineCore.step_fn``,
``structured_output_manager``, the LoRA manager, ``CompilationConfig.static_forward_context``, and
the scheduler's queues (read only).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from vllm import PoolingParams, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreRequest, core as engine_core
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from gpupoold.errors import GpupoolError, Refused
from gpupoold.memory.device import Device
from gpupoold.memory.group.link import RankLost
from gpupoold.memory.host import KvHostCache, Slot
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.kv import KvMemory
from gpupoold.memory.pages import WeightsId
from gpupoold.memory.prefix_tiers import PrefixTiers
from gpupoold.memory.weights import WeightMemory
from gpupoold.wire.messages import (
    EngineMemory,
    KvTransfer,
    LoadedModel,
    ModelToLoad,
    RequestProgress,
)
from gpupoold.worker.engine.adapters import EngineAdapters, RankAdapters
from gpupoold.worker.engine.block_demand import BlockPoolLedger, ComputedKv, geometry_of
from gpupoold.worker.engine.configuration import engine_config, refusal
from gpupoold.worker.engine.families import forget_changed_files, sharing_of
from gpupoold.worker.engine.grammars import EngineGrammars, use_grammars
from gpupoold.worker.engine.layer_gates import LayerGates
from gpupoold.worker.engine.prefixes import StoredPrefixes, shared_owner
from gpupoold.worker.engine.scheduler import resume
from gpupoold.worker.engine.steps import EngineSteps, Step
from gpupoold.worker.engine.vllm_process import (
    PooledMemory,
    RankExecutor,
    drop_runner,
    start_load,
)
from gpupoold.worker.process import engine_arguments
from gpupoold.worker.threads import HEAP
from gpupoold.worker.weights import tensors
from gpupoold.worker.weights.loading import SNAPSHOT_FORMAT, ModelLoad
from gpupoold.worker.weights.rank_loads import LeaderLoad

# Former models of an engine for which it remembers the gates.
_MAX_KNOWN = 64
_SCHEDULERS = {True: "scheduler.AsyncPooledScheduler", False: "scheduler.PooledScheduler"}


class ModelEngine:
    """One model's engine with its memory; stepped only while its weights are resident.

    ``name`` is unique on the device. While an engine is built beside the model's present engine,
    the name is not the model's, which is ``info.name``.
    """

    def __init__(
        self,
        name: str,
        core: EngineCore,
        load: ModelLoad,
        kv: KvMemory,
        info: LoadedModel,
        prefixes: PrefixTiers | None = None,
        kv_identity: str = "",
    ) -> None:
        """``prefixes`` keeps the KV of ended requests, if the engine caches prefixes; for
        ``kv_identity`` see :class:`~gpupoold.wire.messages.LoadModel`.
        """
        assert load.weights is not None and load.layout is not None
        self._core: Any = core
        self.name = name
        self.info = info
        self.weights: WeightMemory = load.weights
        self.sharing = load.sharing
        self.memory = EngineMemory()
        """The memory outside the pages, as measured around the engine's first load."""
        self.layout_digest = load.layout.digest
        self.layers, self.layer_ends = load.layout.layers, load.layout.layer_ends
        self.kv = kv
        self._ledger = BlockPoolLedger(_block_pool(core))
        kv.attach(self._ledger)
        self._scheduler: Any = core.scheduler
        self._scheduler.kv = kv
        self._scheduler.name = info.name
        self.prefixes: StoredPrefixes | None = None
        self._keep_prefixes(prefixes, kv_identity)
        self.steps = EngineSteps(core, info.name)
        ranks = None
        if isinstance(load, LeaderLoad):
            ranks = RankAdapters(load.engine, load.group)
        self.adapters = EngineAdapters(info.name, _runner(core), self.weights, ranks)
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self.known_gates: dict[WeightsId, LayerGates | None] = {}
        """Whether turns of a former model could start early, and how."""

    @property
    def weights_id(self) -> WeightsId:
        """The weights, in this engine or without an engine."""
        return WeightsId(self.info.name, self.weights.snapshot.file_id)

    def _keep_prefixes(self, prefixes: PrefixTiers | None, kv_identity: str) -> None:
        pool = _block_pool(self._core)
        if prefixes is None or not pool.enable_caching or not self.info.generates:
            return
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        self.prefixes = self._scheduler.prefixes = StoredPrefixes(
            managers,
            pool,
            self._ledger,
            self.kv,
            prefixes,
            lambda: bool(self._scheduler.lacks_blocks(self._ledger.num_free)),
            shared_owner(self.info.name, kv_identity, managers, self.kv.geometry.rows),
        )

    def vacate(self) -> None:
        """Free the pages, and drop the caches, of a model without requests; keep the engine.

        Another model of the family may then be bound to the engine. The weights stay in the pool as
        unbound pages.
        """
        assert self.sharing.family
        self.drop_encoder_outputs()
        if self.prefixes is not None:
            self.prefixes.drop_ended()
            self.prefixes.drop()
            self.prefixes.close()
            self.prefixes = self._scheduler.prefixes = None
        self.preempt()
        self.kv.discard_dead()
        self.kv.unmap(self.kv.index.idle())
        if len(self.known_gates) == _MAX_KNOWN:
            del self.known_gates[next(iter(self.known_gates))]
        self.known_gates[self.weights_id] = self.worker.gates
        self.weights.unbind(self.weights_id)
        self.start_early(None)

    def start_early(self, gates: LayerGates | None) -> None:
        """Let steps begin before all weights are present, and wait at the gates; None: not."""
        self.worker.gates = gates
        whole_bytes = self.weights.num_bytes
        self.weights.start_bytes = whole_bytes if gates is None else self.layer_ends[0]

    def bind(
        self,
        model: str,
        name: str,
        snapshot: HostBuffer,
        grammars: EngineGrammars,
        prefixes: PrefixTiers | None,
        kv_identity: str,
    ) -> HostBuffer:
        """Serve another model of the family after :meth:`vacate`, called ``name`` here.

        ``snapshot`` is given to ``pin_later`` before. Returns the former model's, which the caller
        unpins and closes.
        """
        former = self.weights.detach_snapshot()
        self.weights.attach_snapshot(snapshot)
        self.name = name
        self.info = msgspec.structs.replace(self.info, name=model)
        self._scheduler.name = self.steps.name = self.adapters.model = model
        self._core.structured_output_manager.clear_backend()
        use_grammars(self._core, grammars)
        self._keep_prefixes(prefixes, kv_identity)
        return former

    def add(
        self,
        frames: list[bytes],
        output_token_ids: Sequence[int] = (),
        kv: tuple[Slot, KvTransfer] | None = None,
        frontend: int = 0,
    ) -> None:
        """Queue a request encoded by frontend ``frontend``; continue after ``output_token_ids``.

        ``kv`` has a slot with KV of the request. The slot is freed if not needed.

        Raises:
            Refused: the engine does not accept the request.
        """
        slot, attached = None if kv is None else kv[0], list[Request]()

        def attach(request: Request) -> None:
            nonlocal slot
            if kv is not None:
                slot = None
                attached.extend([request] if self._attach(request, *kv) else [])

        try:
            decoded = self._decoder.decode(frames)
            decoded.client_index = frontend  # the engine groups outputs by this index
            self.adapters.resolve(decoded)
            request, wave = self._core.preprocess_add_request(decoded)
            if output_token_ids:
                resume(self._core, request, wave, output_token_ids, attach)
            else:
                attach(request)
                self._core.add_request(request, wave)
            if self.prefixes is not None and not attached:
                self.prefixes.attach(request)
        except Exception as error:  # one request's error must not end others
            if slot is not None:
                slot.free()
            for request in attached:
                self._scheduler.detach(request)
            self.kv.discard_dead()
            raise Refused(f"{self.name}: the engine refused the request: {error}") from error

    @property
    def worker(self) -> PooledMemory:
        """The vLLM worker, which makes the steps."""
        worker: PooledMemory = self._core.model_executor.driver_worker.worker
        return worker

    @property
    def runner(self) -> Any:
        """The model runner of vLLM's worker."""
        return self.worker.model_runner

    def take_waited_s(self) -> float:
        """Return the seconds that steps have waited for weights since the last call."""
        gates = self.worker.gates
        return 0.0 if gates is None else gates.take_waited_s()

    def overwrite_weights(self, device: Device, span: range) -> None:
        """Overwrite bytes of the weights on all ranks, after the steps begun before."""
        tensors.spoil(device, self.weights.address + span.start, len(span))
        if isinstance(executor := self._core.model_executor, RankExecutor):
            executor.overwrite(span)

    def isolate(self, request_id: str) -> None:
        """Run a request that is about to be added only in steps without other requests."""
        self._scheduler.isolate(request_id)

    def end_isolation(self, request_id: str) -> None:
        """Run a request in steps with other requests again."""
        self.steps.wait()
        self._scheduler.end_isolation(request_id)

    def has_grammar(self, request_id: str) -> bool:
        """Return whether the grammar of a request has been compiled, or is not needed."""
        request = self._core.scheduler.requests.get(request_id)
        structured = None if request is None else request.structured_output_request
        return structured is None or structured.grammar is not None

    def _attach(self, request: Request, slot: Slot, transfer: KvTransfer) -> bool:
        """Give a new request the KV in ``slot``; return False if impossible, and free the slot."""
        if slot.num_bytes != transfer.num_blocks * self.kv.geometry.block_bytes:
            slot.free()
            return False
        blocks = self.kv.attach_slot(slot, transfer.num_blocks)
        if blocks is None:
            slot.free()
            return False
        if self._scheduler.attach(request, blocks, transfer.num_computed_tokens):
            return True
        self._ledger.give(blocks)
        self.kv.discard_dead()
        return False

    def computed_kv(self, request_id: str) -> ComputedKv | None:
        """Return what a request needs to continue elsewhere; None for an unknown request."""
        self.steps.wait()
        request = self._core.scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            return None
        computed: ComputedKv = self._scheduler.computed_kv(request)
        return computed

    def num_output_tokens(self, request_id: str) -> int | None:
        """Return the number of tokens of a request's answer; None for an unknown request."""
        request = self._core.scheduler.requests.get(request_id)
        return None if request is None else int(request.num_output_tokens)

    @property
    def max_batched_tokens(self) -> int:
        """Largest number of tokens in a step; longer prompts are prefilled in chunks."""
        return int(self._core.scheduler.max_num_scheduled_tokens)

    @property
    def max_sequences(self) -> int:
        """Largest number of requests in a step."""
        return int(self._core.scheduler.max_num_running_reqs)

    @property
    def max_tokens_each(self) -> int:
        """Largest number of tokens that an answer gains in a step: a whole draft, and one more."""
        return 1 + int(self._core.scheduler.num_spec_tokens)

    def add_synthetic(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        """Queue a greedy request with a synthetic prompt and exactly ``max_tokens`` tokens.

        A pooling model makes one result instead of tokens. No two prompts share a prefix, so every
        prompt is prefilled in full.
        """
        request = self._synthetic(request_id, num_prompt_tokens, max_tokens)
        self._core.add_request(*self._core.preprocess_add_request(request))

    def resume_synthetic(
        self,
        request_id: str,
        num_prompt_tokens: int,
        max_tokens: int,
        token_ids: Sequence[int],
        kv: tuple[Slot, KvTransfer],
    ) -> None:
        """Queue the rest of such a request after ``token_ids``, with its KV.

        Raises:
            Refused: the engine does not accept the request.
        """
        request = self._synthetic(request_id, num_prompt_tokens, max_tokens)
        frames: Any = MsgpackEncoder().encode(request)
        self.add([bytes(frame) for frame in frames], token_ids, kv)

    def _synthetic(
        self, request_id: str, num_prompt_tokens: int, max_tokens: int
    ) -> EngineCoreRequest:
        size = self._core.vllm_config.model_config.get_vocab_size()
        tokens = random.Random(request_id)
        sampling = pooling = None
        if self.info.generates:
            sampling = SamplingParams(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
            )
        else:
            pooling = self._pooling_params()
        if self.prefixes is not None:
            self.prefixes.unkept.add(request_id)
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=tokens.choices(range(size), k=num_prompt_tokens),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=pooling,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )

    def _pooling_params(self) -> PoolingParams:
        """Return the parameters of a synthetic request, whose result has no activation."""
        config = self._core.vllm_config.model_config
        task = config.get_pooling_task(self.info.supported_tasks)
        params = PoolingParams(task=task, use_activation=False)
        params.verify(config)
        return params

    def abort(self, request_ids: list[str]) -> None:
        """Abort requests; their blocks become free at once."""
        self._core.abort_requests(request_ids)

    def has_requests(self) -> bool:
        """Return whether a step would do work; ended requests may need a step for clean-up."""
        return bool(self._core.scheduler.has_requests())

    @contextlib.contextmanager
    def only(self, request_id: str) -> Iterator[None]:
        """Exclude all other requests from steps inside the context."""
        self._scheduler.alone = request_id
        try:
            yield
        finally:
            self._scheduler.alone = None

    def is_ready(self) -> bool:
        """Return whether a step would do work now: all KV of some request is on the device."""
        if self.kv.is_whole:
            return self.has_requests()
        return self._scheduler.can_schedule()

    @property
    def waits_for_prefixes(self) -> bool:
        """True if no request could run now, because KV of earlier requests is being fetched."""
        return (
            self.prefixes is not None
            and self.prefixes.is_fetching
            and not self.steps.are_under_way
            and not self._scheduler.can_schedule()
        )

    def wanted_blocks(self) -> Iterator[int]:
        """Yield blocks of running requests, in the order in which the requests need the blocks."""
        found: Iterator[int] = self._scheduler.blocks_under_way()
        return found

    def step(self, chunk_tokens: int | None = None) -> list[RequestProgress]:
        """Run one step to its end, after all launched steps; return the requests' progress."""
        return [item for step in self.whole_steps(chunk_tokens) for item in step.progress]

    def begin_step(self) -> list[RequestProgress]:
        """Begin a step; return the progress of the step before, or without overlap of this step."""
        return [item for step in self.steps.begin() for item in step.progress]

    def end_steps(self) -> list[RequestProgress]:
        """Wait for the steps begun; return their progress since the last call."""
        return [item for step in self.steps.settle() for item in step.progress]

    def whole_steps(self, chunk_tokens: int | None = None) -> list[Step]:
        """Run one step to its end, after all launched steps; return the results."""
        return [*self.steps.begin(chunk_tokens), *self.steps.settle()]

    def num_missing_blocks(self) -> tuple[int, int]:
        """Return an upper bound of the blocks that the next step may need beyond free blocks.

        The second number is how many more blocks would do for the next steps of all answers.
        """
        num_free, limit = self._ledger.num_free, self.kv.geometry.num_blocks - 1
        of_answers = self._scheduler.num_blocks_of_answers()
        if of_answers is not None and of_answers <= num_free:
            return 0, 0
        missing = max(0, min(self._scheduler.num_wanted_blocks(), limit) - num_free)
        return missing, max(0, (of_answers or 0) - num_free - missing)

    @property
    def _encoder_outputs(self) -> dict[str, Any]:
        """The image encoder's outputs, kept until the prompt's KV exists, and for equal images.

        vLLM bounds the outputs of one model by the tokens of a step or of an image. Only the model
        with the turn keeps outputs, so all models of a device together need the memory of one.
        """
        cache = self.runner.encoder_cache
        # A dictionary by hash in vLLM's first model runner; the second has None or an object.
        outputs: dict[str, Any] = getattr(cache, "encoder_outputs", cache or {})
        return outputs

    @property
    def encoder_bytes(self) -> int:
        """Size of the image encoder's outputs, which are outside the device's pages."""
        return sum(output.nbytes for output in self._encoder_outputs.values())

    def check_encoder_outputs(self) -> None:
        """Compare the outputs with the scheduler's account of them, between two steps.

        Raises:
            AssertionError: an output is of no known image, or there are too many.
        """
        manager = self._core.scheduler.encoder_cache_manager
        unknown = self._encoder_outputs.keys() - {*manager.cached, *manager.freed}
        assert not unknown, f"{len(unknown)} outputs of the encoder belong to no image"
        num_kept = sum(manager.num_embeds_by_hash.values())
        assert num_kept <= manager.cache_size, f"{num_kept} of {manager.cache_size} tokens"

    def drop_encoder_outputs(self) -> None:
        """Free the image encoder's outputs; what a request still needs is computed anew."""
        self.steps.wait()
        if self._encoder_outputs:
            # vLLM's own method also warns if there are requests.
            self._core.scheduler.reset_encoder_cache()
            self._core.model_executor.reset_encoder_cache()

    def preempt(self) -> None:
        """Drop the KV of all requests; the engine recomputes the KV when the requests run again."""
        self.steps.wait()
        self.kv.finish_exports()
        with self.kv.with_reserved_blocks():
            self._core.scheduler.reset_prefix_cache(reset_running_requests=True)

    def close(self) -> None:
        """Drop the engine and free its memory.

        State shared with other engines is kept: vLLM's shutdown would destroy the process groups
        that all engines use.
        """
        core = self._core
        core.structured_output_manager.clear_backend()
        core.scheduler.shutdown()
        if isinstance(core.model_executor, RankExecutor):
            core.model_executor.close_engine()
        drop_runner(_runner(core))
        self._scheduler = self._core = None
        self.steps.close()
        self.adapters.close()
        del core
        HEAP.engine_closed()
        self.kv.close()
        if self.prefixes is not None:
            self.prefixes.close()
            self.prefixes = None
        self.weights.close()


def load_engine(
    model: ModelToLoad,
    load: ModelLoad,
    host: KvHostCache,
    name: str,
    prefixes: PrefixTiers | None = None,
    kv_identity: str = "",
) -> ModelEngine:
    """Build a model's engine, called ``name``, on gpupool's memory.

    ``prefixes`` keeps the KV of ended requests, if given; for ``kv_identity`` see
    :class:`~gpupoold.wire.messages.LoadModel`. Raises GpupoolError, with vLLM's reason, if the
    checkpoint cannot be served here, and RankLost if another rank has ended: then this process ends
    soon.
    """
    page_bytes = load.device.page_bytes
    start_load(skips_checkpoint=load.skips_checkpoint)
    with load.active():
        try:
            config = config_of(model, load.device, skips_checkpoint=load.skips_checkpoint)
            load.sharing = sharing_of(model, config, load.device)
            core = _build_core(model, config)
            if load.kv_address_range is None:  # a model without KV has the null block only
                load.make_kv(page_bytes)
            geometry = geometry_of(_runner(core).kv_cache_config, page_bytes)
            assert load.kv_address_range is not None
            kv = KvMemory(geometry, load.kv_address_range, load.device, host)
            info = _describe(model, core, load)
            engine = ModelEngine(name, core, load, kv, info, prefixes, kv_identity)
            problems = engine.adapters.add_all(model.adapters)
            engine.info = msgspec.structs.replace(info, adapter_problems=problems)
            return engine
        except (GpupoolError, RankLost):
            raise
        except Exception as error:
            raise refusal(model.name, error) from error


def config_of(model: ModelToLoad, device: Device, *, skips_checkpoint: bool = False) -> VllmConfig:
    """Return the configuration of a model's engine on a device.

    Raises:
        Exception: any error of vLLM about the model.
    """
    forget_changed_files(model.path)
    return engine_config(
        model,
        is_emulated=device.is_host_addressable,
        load_format=SNAPSHOT_FORMAT if skips_checkpoint else None,
        num_ranks=device.num_ranks,
        page_bytes=device.num_pages * device.page_bytes,
    )


def _build_core(model: ModelToLoad, config: VllmConfig) -> EngineCore:
    scheduling = config.scheduler_config
    if engine_arguments().get("async_scheduling"):
        scheduling.async_scheduling = True  # vLLM ignores the argument on a CPU, but it works
    scheduler = _SCHEDULERS[bool(scheduling.async_scheduling)]
    scheduling.scheduler_cls = f"gpupoold.worker.engine.{scheduler}"
    # vLLM's engine collects all garbage at the end of its start, while other engines wait.
    engine_core.freeze_gc_heap = HEAP.freeze
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    use_grammars(core, EngineGrammars(config, model.name))
    return core


def _describe(model: ModelToLoad, core: Any, load: ModelLoad) -> LoadedModel:
    assert load.layout is not None
    config = core.vllm_config
    blocks = config.cache_config.num_gpu_blocks
    block_size = config.cache_config.block_size
    has_kv = bool(_runner(core).kv_cache_config.kv_cache_tensors)
    kv_bytes = (
        max(1, geometry_of(_runner(core).kv_cache_config, 1).block_bytes // block_size)
        if has_kv
        else 0
    )
    return LoadedModel(
        name=model.name,
        architecture=config.model_config.architecture,
        max_model_len=config.model_config.max_model_len,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        block_size=block_size,
        num_gpu_blocks=blocks,
        weight_bytes=load.layout.num_bytes,
        slot_bytes=load.slot_bytes,
        kv_bytes_per_token=kv_bytes,
        supported_tasks=tuple(core.get_supported_tasks()),
    )


def _block_pool(core: Any) -> Any:
    return core.scheduler.kv_cache_manager.block_pool


def _runner(core: Any) -> Any:
    return core.model_executor.driver_worker.worker.model_runner
