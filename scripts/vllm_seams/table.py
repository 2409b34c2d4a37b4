"""The seams that gpupool's source does not show: attributes of vLLM's objects, relied-on code.

Imports, attributes of imported names, overridden methods and environment variables are read from
the source (``found.py``). An object of vLLM that arrives as ``Any`` is not visible there: its
attributes are listed here, and so is code whose behaviour gpupool relies on (``_SOURCES``). Add a
line with every new use.
"""

from __future__ import annotations

from scripts.vllm_seams.seam import Seam

_ENGINE = "gpupoold/worker/engine/engine.py"
_SCHEDULER = "gpupoold/worker/engine/scheduler.py"
_LEDGER = "gpupoold/worker/engine/block_demand.py"
_PREFIXES = "gpupoold/worker/engine/prefixes.py"
_COMPUTED = "gpupoold/worker/engine/block_demand.py"
_DEMAND = "gpupoold/worker/engine/block_demand.py"
_STEPS = "gpupoold/worker/engine/steps.py"
_ADAPTERS = "gpupoold/worker/engine/adapters.py"
_GRAMMARS = "gpupoold/worker/engine/grammars.py"
_MEMORY = "gpupoold/worker/engine/vllm_process.py"
_FAMILIES = "gpupoold/worker/engine/families.py"
_LATE_GRAPHS = "gpupoold/worker/engine/late_graphs.py"
_DIVISION = "gpupoold/worker/inspection/inspect.py"
_LOADING = "gpupoold/worker/weights/loading.py"
_READING = "gpupoold/worker/weights/reading.py"
_ADAPTER = "gpupoold/frontend/adapter.py"
_CLIENT = "gpupoold/frontend/pool_client.py"
_BOUNDS = "gpupoold/frontend/vllm_bounds.py"
_REQUEST_GRAMMARS = "gpupoold/frontend/vllm_bounds.py"
_TRIAL = "gpupoold/frontend/grammar_checker/trial.py"

_RUNNERS = (
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
)
_KV_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_KV_KINDS = (
    "SingleTypeKVCacheManager",
    "SlidingWindowManager",
    "ChunkedLocalAttentionManager",
    "MambaManager",
)
_WORKERS = ("vllm.v1.worker.gpu_worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker")

# (file, owner, attributes): compared by signature or presence.
_ATTRIBUTES: tuple[tuple[str, str, str], ...] = (
    (
        _MEMORY,
        "vllm.distributed.device_communicators.custom_all_reduce.CustomAllreduce",
        "_IS_CAPTURING _capture_registered",
    ),
    (
        _MEMORY,
        "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator",
        "ca_comm",
    ),
    (
        _ENGINE,
        "vllm.v1.engine.core.EngineCore",
        "scheduler model_executor structured_output_manager vllm_config preprocess_add_request "
        "add_request abort_requests get_supported_tasks",
    ),
    (_STEPS, "vllm.v1.engine.core.EngineCore", "batch_queue step_fn post_step"),
    (
        _ENGINE,
        "vllm.v1.core.sched.scheduler.Scheduler",
        "requests running waiting kv_cache_manager kv_cache_config max_num_running_reqs "
        "max_num_scheduled_tokens has_requests reset_prefix_cache shutdown",
    ),
    (
        _SCHEDULER,
        "vllm.v1.core.sched.scheduler.Scheduler",
        "max_num_active_reqs kv_holding_waiting deferred_waiting num_waiting_for_streaming_input "
        "scheduler_reserve_full_isl num_spec_tokens num_lookahead_tokens _inflight_prefills",
    ),
    (_SCHEDULER, "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator", "single_type_managers"),
    (
        _COMPUTED,
        f"{_KV_MANAGERS}.SingleTypeKVCacheManager",
        "block_size block_pool req_to_blocks get_num_skipped_tokens",
    ),
    (_COMPUTED, f"{_KV_MANAGERS}.MambaManager", "num_speculative_blocks"),
    (
        _PREFIXES,
        f"{_KV_MANAGERS}.SingleTypeKVCacheManager",
        "block_size kv_cache_group_id req_to_blocks get_num_skipped_tokens",
    ),
    (
        _PREFIXES,
        "vllm.v1.core.block_pool.BlockPool",
        "blocks cached_block_hash_to_block hash_block_size enable_caching _insert_block_hash",
    ),
    (_PREFIXES, "vllm.v1.core.block_pool.BlockHashToBlockMap", "get_one_block"),
    (_PREFIXES, "vllm.v1.core.kv_cache_utils.KVCacheBlock", "block_id block_hash is_null"),
    (
        _PREFIXES,
        "vllm.v1.request.Request",
        "block_hashes num_tokens skip_reading_prefix_cache status",
    ),
    (
        _DEMAND,
        f"{_KV_MANAGERS}.SingleTypeKVCacheManager",
        "block_size max_admission_blocks_per_request",
    ),
    (_DEMAND, f"{_KV_MANAGERS}.MambaManager", "num_speculative_blocks"),
    (
        _DEMAND,
        "vllm.v1.request.Request",
        "is_prefill_chunk num_computed_tokens num_tokens_with_spec",
    ),
    (_SCHEDULER, "vllm.v1.metrics.stats.PrefillStats", "set"),
    (
        _SCHEDULER,
        "vllm.v1.core.sched.scheduler.Scheduler",
        "finished_req_ids prev_step_scheduled_req_ids use_v2_model_runner",
    ),
    (_GRAMMARS, "vllm.v1.core.sched.scheduler.Scheduler", "structured_output_manager"),
    (
        _LEDGER,
        "vllm.v1.core.block_pool.BlockPool",
        "blocks free_block_queue evict_blocks touch free_blocks get_num_free_blocks",
    ),
    (_COMPUTED, "vllm.v1.core.block_pool.BlockPool", "blocks null_block"),
    (_LEDGER, "vllm.v1.core.kv_cache_utils.KVCacheBlock", "block_id ref_cnt is_null"),
    (
        _SCHEDULER,
        "vllm.v1.core.kv_cache_manager.KVCacheManager",
        "block_pool coordinator free get_block_ids get_computed_blocks watermark_blocks",
    ),
    (_SCHEDULER, "vllm.v1.core.kv_cache_manager.KVCacheBlocks", "get_block_ids"),
    (
        _LEDGER,
        "vllm.v1.kv_cache_interface.KVCacheConfig",
        "num_blocks kv_cache_tensors kv_cache_groups",
    ),
    (
        _LEDGER,
        "vllm.v1.kv_cache_interface.KVCacheTensor",
        "offset layers layer_stride block_stride",
    ),
    (_SCHEDULER, "vllm.v1.kv_cache_interface.KVCacheGroupSpec", "kv_cache_spec"),
    (_MEMORY, "vllm.v1.kv_cache_interface.KVCacheSpec", "page_size_bytes"),
    (_ENGINE, "vllm.v1.executor.uniproc_executor.UniProcExecutor", "driver_worker"),
    (_ENGINE, "vllm.v1.worker.worker_base.WorkerWrapperBase", "worker"),
    (_ENGINE, "vllm.v1.worker.gpu_worker.Worker", "model_runner"),
    (
        _ENGINE,
        "vllm.engine.arg_utils.EngineArgs",
        "model served_model_name trust_remote_code dtype max_model_len enforce_eager block_size "
        "gpu_memory_utilization worker_cls load_format async_scheduling create_engine_config",
    ),
    (
        _ENGINE,
        "vllm.config.VllmConfig",
        "model_config cache_config scheduler_config compilation_config structured_outputs_config",
    ),
    (
        _ENGINE,
        "vllm.config.ModelConfig",
        "architectures architecture max_model_len dtype runner_type get_vocab_size",
    ),
    (_ENGINE, "vllm.config.CacheConfig", "num_gpu_blocks block_size kv_cache_memory_bytes"),
    (_ENGINE, "vllm.config.SchedulerConfig", "async_scheduling scheduler_cls"),
    (_ENGINE, "vllm.config.CompilationConfig", "static_forward_context"),
    (
        _SCHEDULER,
        "vllm.v1.request.Request",
        "request_id append_output_token_ids num_preemptions take_prefill_stats sampling_params "
        "skip_reading_prefix_cache status prompt_token_ids num_output_tokens output_token_ids "
        "structured_output_request",
    ),
    (_ENGINE, "vllm.v1.request.Request", "num_tokens num_computed_tokens is_finished client_index"),
    (
        _SCHEDULER,
        "vllm.v1.core.sched.output.SchedulerOutput",
        "num_scheduled_tokens total_num_scheduled_tokens scheduled_new_reqs",
    ),
    (
        _GRAMMARS,
        "vllm.v1.structured_output.StructuredOutputManager",
        "executor backend vllm_config tokenizer _grammar_bitmask fill_bitmask_parallel_threshold "
        "_get_constraint_bounds",
    ),
    (_GRAMMARS, "vllm.v1.structured_output.request.StructuredOutputRequest", "grammar"),
    (
        "gpupoold/frontend/grammar_checker/trial.py",
        "vllm.v1.structured_output.backend_types.StructuredOutputGrammar",
        "accept_tokens is_terminated fill_bitmask",
    ),
    (
        "gpupoold/worker/engine/bounded_grammars.py",
        "vllm.v1.structured_output.backend_types.StructuredOutputGrammar",
        "accept_tokens is_terminated fill_bitmask validate_tokens rollback reset",
    ),
    (
        _TRIAL,
        "vllm.v1.structured_output.backend_types.StructuredOutputBackend",
        "compile_grammar allocate_token_bitmask",
    ),
    (_TRIAL, "vllm.sampling_params.SamplingParams", "_validate_structured_outputs"),
    (
        _REQUEST_GRAMMARS,
        "vllm.sampling_params.StructuredOutputsParams",
        "_backend _backend_was_auto json choice grammar",
    ),
    (
        _SCHEDULER,
        "vllm.sampling_params.SamplingParams",
        "prompt_logprobs sampling_type seed structured_outputs",
    ),
    (_ADAPTER, "vllm.v1.engine.EngineCoreOutput", "prefill_stats"),
    (_ADAPTER, "vllm.v1.metrics.stats.PrefillStats", "num_cached_tokens"),
    (_ADAPTER, "vllm.sampling_params.SamplingParams", "extra_args stop bad_words max_tokens"),
    (
        _ADAPTER,
        "vllm.v1.engine.async_llm.AsyncLLM",
        "engine_core output_handler output_processor input_processor renderer shutdown",
    ),
    (
        _ADAPTER,
        "vllm.v1.engine.input_processor.InputProcessor",
        "assign_request_id structured_outputs_config",
    ),
    (_ADAPTER, "vllm.v1.engine.output_processor.OutputProcessor", "request_states abort_requests"),
    (
        _ADAPTER,
        "vllm.v1.engine.output_processor.RequestState",
        "request_id is_prefilling logprobs_processor queue parent_req",
    ),
    (_ADAPTER, "vllm.v1.engine.output_processor.RequestOutputCollector", "put"),
    (_ADAPTER, "vllm.v1.engine.parallel_sampling.ParentRequest", "request_id"),
    (_ADAPTER, "vllm.v1.engine.logprobs.LogprobsProcessor", "num_logprobs num_prompt_logprobs"),
    (
        _ADAPTER,
        "vllm.entrypoints.openai.responses.serving.OpenAIServingResponses",
        "response_store",
    ),
    (
        _BOUNDS,
        "vllm.renderers.base.BaseRenderer",
        "_tokenize_prompt_async process_for_engine_async",
    ),
    (
        "gpupoold/frontend/rendering.py",
        "vllm.renderers.base.BaseRenderer",
        "mm_processor _process_multimodal_async render_chat_async _mm_executor",
    ),
    (
        "gpupoold/frontend/adapter.py",
        "vllm.renderers.online_renderer.OnlineRenderer",
        "create_error_response",
    ),
    (
        "gpupoold/frontend/adapter.py",
        "vllm.entrypoints.openai.responses.serving.OpenAIServingResponses",
        "create_error_response",
    ),
    (
        "gpupoold/frontend/rendering.py",
        "vllm.multimodal.media.MediaConnector",
        "allowed_media_domains media_io_kwargs load_from_url_async",
    ),
    *(
        (_ENGINE, runner, "kv_cache_config get_model model kv_caches compilation_config")
        for runner in _RUNNERS
    ),
    *((_ADAPTERS, runner, "lora_manager") for runner in _RUNNERS),
    *((_ENGINE, runner, "encoder_cache") for runner in _RUNNERS),
    (
        _ENGINE,
        "vllm.v1.core.sched.scheduler.Scheduler",
        "encoder_cache_manager reset_encoder_cache",
    ),
    (_ENGINE, "vllm.v1.executor.abstract.Executor", "reset_encoder_cache"),
    (
        _ADAPTERS,
        "vllm.lora.worker_manager.WorkerLoRAManager",
        "set_active_adapters lora_config _load_adapter _adapter_manager remove_adapter",
    ),
    (
        _ADAPTERS,
        "vllm.lora.model_manager.LoRAModelManager",
        "modules lora_index_to_id add_adapter _get_lora_layer_weights",
    ),
    (_ADAPTERS, "vllm.config.LoRAConfig", "max_loras max_cpu_loras"),
    (_SCHEDULER, "vllm.v1.core.sched.scheduler.Scheduler", "lora_config scheduler_config"),
    (_SCHEDULER, "vllm.v1.request.Request", "lora_request"),
    (_SCHEDULER, "vllm.config.SchedulerConfig", "enable_chunked_prefill"),
    (_MEMORY, "vllm.v1.core.sched.output.SchedulerOutput", "scheduled_cached_reqs"),
    (_MEMORY, "vllm.v1.core.sched.output.CachedRequestData", "resumed_req_ids"),
    (_MEMORY, "vllm.v1.worker.gpu_input_batch.CachedRequestState", "pooling_states"),
    (_MEMORY, "vllm.v1.pool.metadata.PoolingStates", "clean"),
    (_ENGINE, "vllm.config.ModelConfig", "get_pooling_task"),
    (_ENGINE, "vllm.pooling_params.PoolingParams", "verify"),
    (_SCHEDULER, _RUNNERS[0], "requests device input_batch sampler"),
    (_SCHEDULER, "vllm.v1.worker.gpu_input_batch.InputBatch", "vocab_size"),
    (_SCHEDULER, "vllm.v1.sample.sampler.Sampler", "topk_topp_sampler"),
    *((_MEMORY, runner, "get_kv_cache_spec capture_model") for runner in _RUNNERS),
    (
        _MEMORY,
        "vllm.model_executor.model_loader.default_loader.DefaultModelLoader",
        "load_weights get_all_weights",
    ),
    (_DIVISION, "vllm.distributed.parallel_state.GroupCoordinator", "world_size"),
    (_DIVISION, "vllm.config.ModelConfig", "verify_with_parallel_config"),
    (_READING, "vllm.model_executor.model_loader.utils", "device_loading_context"),
    (
        _LATE_GRAPHS,
        "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager",
        "_candidates _capture_descs compilation_config decode_query_len",
    ),
    (_FAMILIES, "vllm.config.VllmConfig", "compute_hash quant_config reasoning_config"),
    (
        _FAMILIES,
        "vllm.config.ModelConfig",
        "model hf_config hf_text_config trust_remote_code pooler_config runner_type architecture",
    ),
)

# (file, name): the code is compared.
_SOURCES: tuple[tuple[str, str], ...] = (
    # Captures of some sizes at a time, and the blocks that dummy requests read and write.
    *(
        (_LATE_GRAPHS, f"vllm.v1.worker.gpu.{name}")
        for name in (
            "cudagraph_utils.CudaGraphManager._init_candidates",
            "cudagraph_utils.CudaGraphManager.dispatch",
            "dp_utils.dispatch_cg_and_sync_dp",
            "cudagraph_utils.CudaGraphManager.capture",
            "cudagraph_utils.ModelCudaGraphManager.capture",
            "cudagraph_utils.prepare_inputs_to_capture",
            "block_table.BlockTables.get_dummy_block_tables",
            "block_table.BlockTables.get_dummy_slot_mappings",
        )
    ),
    # Ranks with different names use sockets instead of shared memory.
    (
        "gpupoold/worker/engine/vllm_process.py",
        "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator",
    ),
    # Captures without registered buffers, and what an all-reduce does between two captures.
    (
        _MEMORY,
        "vllm.distributed.device_communicators.custom_all_reduce.CustomAllreduce.custom_all_reduce",
    ),
    # The names of compiled code, in which the layout's digest takes the place of the path.
    (_FAMILIES, "vllm.config.VllmConfig.compute_hash"),
    (_FAMILIES, "vllm.config.ModelConfig.compute_hash"),
    (_FAMILIES, "vllm.compilation.caching.aot_compile_hash_factors"),
    # The order in which modules are prepared, and the context around each of them.
    (_LOADING, "vllm.model_executor.model_loader.utils.process_weights_after_loading"),
    (_LOADING, "vllm.model_executor.model_loader.base_loader.BaseModelLoader.load_model"),
    # The blocks' states are followed through this queue, which sees every change.
    (_ENGINE, "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue"),
    (_ENGINE, "vllm.v1.core.block_pool.BlockPool.touch"),
    (_ENGINE, "vllm.v1.core.block_pool.BlockPool.free_blocks"),
    (_ENGINE, "vllm.v1.core.block_pool.BlockPool.evict_blocks"),
    (_ENGINE, "vllm.v1.core.block_pool.BlockPool.get_new_blocks"),
    # Blocks with bytes in host memory are entered in the prefix cache; the keys do not depend on
    # the process.
    (_PREFIXES, "vllm.v1.core.block_pool.BlockPool.cache_full_blocks"),
    (_PREFIXES, "vllm.v1.core.block_pool.BlockPool._insert_block_hash"),
    (_PREFIXES, "vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks"),
    # A request that waits with KV is continued at its number of computed tokens.
    (_SCHEDULER, "vllm.v1.core.sched.scheduler.Scheduler._holds_kv_blocks"),
    (_SCHEDULER, "vllm.v1.core.sched.scheduler.Scheduler._enqueue_waiting_request"),
    (_COMPUTED, "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots"),
    *((_COMPUTED, f"{_KV_MANAGERS}.{name}.get_num_skipped_tokens") for name in _KV_KINDS),
    (_COMPUTED, f"{_KV_MANAGERS}.MambaManager.allocate_new_blocks"),
    # A step: the order of schedule, launch and update.
    (_STEPS, "vllm.v1.engine.core.EngineCore.step"),
    (_STEPS, "vllm.v1.engine.core.EngineCore.step_with_batch_queue"),
    (_STEPS, "vllm.v1.engine.core.EngineCore.post_step"),
    (_ENGINE, "vllm.v1.engine.core.EngineCore.__init__"),
    (_ENGINE, "vllm.v1.engine.core.EngineCore._initialize_kv_caches"),
    (_ENGINE, "vllm.v1.engine.core.EngineCore.preprocess_add_request"),
    # Requests that may not run leave ``running`` for a call of ``schedule``.
    (_SCHEDULER, "vllm.v1.core.sched.scheduler.Scheduler.schedule"),
    (_SCHEDULER, "vllm.v1.core.sched.scheduler.Scheduler._handle_blocked_waiting_request"),
    (_SCHEDULER, "vllm.v1.core.sched.scheduler.Scheduler.update_from_output"),
    (_SCHEDULER, "vllm.v1.core.sched.scheduler.Scheduler._preempt_request"),
    (_SCHEDULER, "vllm.v1.core.sched.scheduler.Scheduler.finish_requests"),
    (_SCHEDULER, "vllm.v1.core.sched.scheduler.Scheduler.reset_prefix_cache"),
    # The only ``torch.zeros`` of bytes during a load: the KV buffer.
    (_LOADING, "vllm.v1.worker.utils.allocate_kv_cache"),
    (_LOADING, "vllm.v1.worker.gpu_worker.Worker.initialize_from_config"),
    (_LOADING, "vllm.v1.worker.gpu_worker.Worker._maybe_get_memory_pool_context"),
    *(
        (_MEMORY, f"{worker}.{method}")
        for worker in _WORKERS
        for method in (
            "init_device",
            "load_model",
            "determine_available_memory",
            "compile_or_warm_up_model",
        )
    ),
    # The record of a preempted request in the first model runner.
    (_SCHEDULER, "vllm.v1.worker.gpu_model_runner.GPUModelRunner._update_states"),
    (_SCHEDULER, "vllm.v1.worker.gpu_input_batch.CachedRequestState"),
    (_SCHEDULER, "vllm.v1.request.Request.append_output_token_ids"),
    (_SCHEDULER, "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler"),
    # Slots are filled between two steps, and only here.
    (_ADAPTERS, "vllm.lora.worker_manager.WorkerLoRAManager.set_active_adapters"),
    (_ADAPTERS, "vllm.lora.model_manager.LoRAModelManager.activate_adapter"),
    (_ADAPTERS, "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"),
    (_GRAMMARS, "vllm.v1.structured_output.StructuredOutputManager.grammar_init"),
    (_GRAMMARS, "vllm.v1.structured_output.StructuredOutputManager._create_grammar"),
    (_GRAMMARS, "vllm.v1.structured_output.StructuredOutputManager.clear_backend"),
    (_GRAMMARS, "vllm.v1.structured_output.StructuredOutputManager.accept_tokens"),
    (_GRAMMARS, "vllm.v1.structured_output.StructuredOutputManager.grammar_bitmask"),
    (_GRAMMARS, "vllm.v1.structured_output.StructuredOutputManager.validate_tokens"),
    ("gpupoold/grammar_backends.py", "vllm.v1.structured_output.backend_xgrammar.XgrammarBackend"),
    (_REQUEST_GRAMMARS, "vllm.sampling_params.SamplingParams._validate_structured_outputs"),
    (_REQUEST_GRAMMARS, "vllm.v1.engine.input_processor.InputProcessor.process_inputs"),
    (_ADAPTER, "vllm.v1.engine.input_processor.InputProcessor.assign_request_id"),
    # The calls of the engine's client.
    (_CLIENT, "vllm.v1.engine.async_llm.AsyncLLM.__init__"),
    (_CLIENT, "vllm.v1.engine.async_llm.AsyncLLM.add_request"),
    (_CLIENT, "vllm.v1.engine.async_llm.AsyncLLM._add_request"),
    (_CLIENT, "vllm.v1.engine.async_llm.AsyncLLM.generate"),
    (_CLIENT, "vllm.v1.engine.async_llm.AsyncLLM.abort"),
    (_CLIENT, "vllm.v1.engine.async_llm.AsyncLLM._run_output_handler"),
    (_CLIENT, "vllm.v1.engine.async_llm.AsyncLLM.shutdown"),
    (_ADAPTER, "vllm.v1.engine.output_processor.OutputProcessor.abort_requests"),
    (_ADAPTER, "vllm.v1.engine.output_processor.RequestOutputCollector"),
    (_ADAPTER, "vllm.entrypoints.launchers.app.build_app"),
    (_ADAPTER, "vllm.entrypoints.launchers.api_server.app_state.init_app_state"),
    (_BOUNDS, "vllm.renderers.base.BaseRenderer.process_for_engine_async"),
    (
        "gpupoold/frontend/rendering.py",
        "vllm.multimodal.media.MediaConnector._assert_url_in_allowed_media_domains",
    ),
    (
        "gpupoold/worker/engine/vllm_process.py",
        "vllm.compilation.wrapper.TorchCompileWithNoGuardsWrapper",
    ),
)


def seams_in_table() -> list[Seam]:
    """Return the seams that are listed by hand."""
    attributes = [
        Seam(f"{owner}.{name}", "auto", (user,))
        for user, owner, names in _ATTRIBUTES
        for name in names.split()
    ]
    return attributes + [Seam(name, "source", (user,)) for user, name in _SOURCES]
