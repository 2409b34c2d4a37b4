"""The options of vLLM that a model may have, and the reasons for refusing others. Pure.

Every argument of ``vllm serve``, in the versions in ``gpupoold/engine_versions.py``, is in one of
the two tables.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from gpupoold.errors import Refused, UsageError
from gpupoold.json_values import check_json_text

ENGINE_HELP = f"see `{Path(sys.executable).with_name('vllm')} serve --help=all`"
"""Where all options are explained: vLLM's command is not on the path of users."""

MAX_OPTIONS = 64
MAX_VALUE_CHARACTERS = 65_536

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}(\.[A-Za-z0-9_+-]{1,64}){0,8}")

_OFFERED = """
additional_config allow_deprecated_quantization
anthropic_disabled_thinking_effort attention_backend attention_config chat_template
chat_template_content_format code_revision cohere_format cohere_is_reasoning_model
compilation_config config_format convert cudagraph_capture_sizes default_chat_template_kwargs
disable_cascade_attn disable_chunked_mm_input disable_sliding_window enable_auto_tool_choice
enable_chunked_prefill enable_flashinfer_autotune
enable_force_include_usage enable_mamba_cache_stochastic_rounding enable_mixed_moe_lora_format
enable_moe_shared_loras enable_per_request_metrics enable_prompt_tokens_details
enable_tower_connector_lora enforce_eager engram_config exclude_tools_when_tool_choice_none
fingerprint_mode fingerprint_value fully_sharded_loras gdn_prefill_backend generation_config
hf_config_path hf_overrides ignore_patterns interleave_mm_strings ir_op_priority
kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype kv_cache_dtype_skip_layers
kv_sharing_fast_prefill language_model_only limit_mm_per_prompt linear_backend logprobs_mode
long_prefill_token_threshold long_prefill_token_threshold_adaptive lora_dtype
lora_target_modules mamba_backend mamba_cache_dtype mamba_cache_philox_rounds
mamba_ssm_cache_dtype mamba_ssu_algorithm max_cpu_loras max_cudagraph_capture_size max_logprobs
max_lora_cls_labels max_lora_rank max_loras max_num_active_seqs max_num_batched_tokens
max_num_scheduled_tokens max_num_seqs media_io_kwargs mm_device_do_normalize
mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_hasher_algorithm
mm_processor_kwargs model_impl moe_backend optimization_level override_generation_config
performance_mode pooler_config quantization quantization_config reasoning_config
reasoning_parser response_role return_tokens_as_token_ids runner safetensors_load_strategy seed
sparse_indexer_topk_backend spec_method spec_model spec_tokens specialize_active_lora
speculative_config sse_keep_alive_interval structured_outputs_config swa_bounded_replay
tokenizer tokenizer_mode tokenizer_revision tool_call_parser tool_strict_level
trust_request_chat_template use_fp64_gumbel video_pruning_method video_pruning_rate
"""
OFFERED = frozenset(_OFFERED.split())

_API_ONLY = """
anthropic_disabled_thinking_effort chat_template
chat_template_content_format cohere_format cohere_is_reasoning_model default_chat_template_kwargs
enable_auto_tool_choice enable_force_include_usage
enable_per_request_metrics enable_prompt_tokens_details exclude_tools_when_tool_choice_none
fingerprint_mode fingerprint_value response_role return_tokens_as_token_ids sse_keep_alive_interval
tool_call_parser tool_strict_level trust_request_chat_template
"""
API_ONLY = frozenset(_API_ONLY.split())
"""Offered options that change the API of a model, not its engine."""

_MEMORY = "gpupool divides the device's memory between models"
_SCHEDULE = "gpupool schedules the requests"
_DEVICES = "gpupool assigns devices and makes the processes"
_HTTP = "gpupool serves HTTP; see `gpupool config`"
_CODE = "gpupool loads no code besides the engine's into its processes"
_LOGS = "gpupool logs and measures; see `gpupool logs` and /metrics"
_KV = "gpupool moves KV between devices and host memory"
_CACHE = "gpupool configures caches that frontends and workers share"
_NO_STATE = "gpupool may run two requests of a client on different devices"
_FOLDER = "the model's folder is chosen by --source and --revision"
_LORA = "add adapters with `gpupool add-adapter`"

REFUSED: Mapping[str, str] = {
    name: reason
    for reason, names in {
        _MEMORY: "block_size cpu_offload_gb cpu_offload_params enable_cumem_allocator "
        "enable_nccl_comm_suspend enable_sleep_mode gpu_memory_utilization kv_cache_memory_bytes "
        "mm_ipc_gpu_memory_gb num_gpu_blocks_override offload_backend offload_group_size "
        "offload_num_in_group offload_params offload_prefetch_step sleep_mode_offload_cudagraph "
        "sleep_preserve_parameter_names weight_transfer_config",
        _SCHEDULE: "async_scheduling diffusion_config max_num_queued_reqs max_num_queued_tokens "
        "prefill_schedule_interval scheduler_cls scheduler_reserve_full_isl scheduling_policy "
        "stream_interval watermark watermark_config",
        _DEVICES: "all2all_backend api_server_count cp_kv_cache_interleave_size "
        "cpu_distributed_timeout_seconds data_parallel_address data_parallel_backend "
        "data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb "
        "data_parallel_rank data_parallel_rpc_port data_parallel_size data_parallel_size_local "
        "data_parallel_start_rank data_parallel_supervisor_port dbo_decode_token_threshold "
        "dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size "
        "dcp_q_replicate decode_context_parallel_size device_ids disable_custom_all_reduce "
        "disable_nccl_for_dp_synchronization distributed_executor_backend "
        "distributed_timeout_seconds dp_supervisor_probe_failure_threshold "
        "dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_sync_interval "
        "elastic_ep_max_dp_size enable_batch_sharded_sampling enable_dbo enable_elastic_ep "
        "enable_ep_weight_filter enable_eplb enable_expert_parallel enable_fault_tolerance "
        "enable_hc_sp enable_scale_out enable_shm_tensor_arena eplb_config "
        "expert_placement_strategy fault_tolerance_config headless master_addr master_port "
        "max_parallel_loading_workers mm_encoder_tp_mode nnodes node_rank numa_bind "
        "numa_bind_cpus numa_bind_nodes pipeline_parallel_size prefill_context_parallel_size "
        "ray_workers_use_nsight shutdown_timeout tensor_parallel_size ubatch_size worker_cls",
        _HTTP: "allow_credentials allowed_headers allowed_local_media_path allowed_media_domains "
        "allowed_methods allowed_origins api_key config disable_access_log_for_endpoints "
        "disable_fastapi_docs disable_uvicorn_access_log enable_offline_docs "
        "enable_request_id_headers enable_ssl_refresh enable_tokenizer_info_endpoint grpc "
        "grpc_port h11_max_header_count h11_max_incomplete_event_size host port root_path "
        "ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers ssl_keyfile tokens_only tool_server "
        "uds",
        _CODE: "io_processor_plugin logits_processors middleware model_class_overrides "
        "reasoning_parser_plugin tool_parser_plugin worker_extension_cls",
        _LOGS: "aggregate_engine_logging collect_detailed_traces cudagraph_metrics "
        "custom_histogram_buckets disable_log_stats enable_layerwise_nvtx_tracing "
        "enable_log_deltas enable_log_outputs enable_log_requests "
        "enable_logging_iteration_details enable_mfu_metrics enable_server_load_tracking "
        "enable_trace_replay fail_on_environ_validation jit_monitor_mode jit_monitor_verbose "
        "kv_cache_metrics kv_cache_metrics_sample log_config_file log_error_stack log_level "
        "logging_config max_log_len otlp_traces_endpoint per_request_spec_decode_metrics "
        "profiler_config show_hidden_metrics_for_version use_tqdm_on_load uvicorn_log_level",
        _KV: "aux_output_config disable_hybrid_kv_cache_manager ec_manager_config "
        "ec_transfer_config enable_mamba_shared_prefix_checkpoint enable_prefix_caching "
        "enable_prompt_embeds enable_return_routed_experts kv_events_config kv_offloading_backend "
        "kv_offloading_size kv_transfer_config mamba_block_size mamba_cache_mode "
        "prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit "
        "replayssm_buffer_len return_sampling_mask use_replayssm",
        _CACHE: "enable_mm_embeds mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path "
        "mm_encoder_only mm_processor_cache_gb mm_processor_cache_type mm_processor_device "
        "mm_shm_cache_max_object_size_mb mm_tensor_ipc renderer_num_workers skip_mm_profiling "
        "skip_tokenizer_init trust_request_mm_kwargs",
        _NO_STATE: "enable_flash_late_interaction",
        _FOLDER: "download_dir hf_token load_format model model_loader_extra_config "
        "pt_load_map_location revision safetensors_prefetch_block_size "
        "safetensors_prefetch_num_threads",
        _LORA: "default_mm_loras enable_lora lora_modules",
        "give the names as NAME and --alias": "served_model_name",
        "give --dtype": "dtype",
        "give --max-len": "max_model_len",
        "set security.allow_remote_code in the configuration": "trust_remote_code",
    }.items()
    for name in names.split()
}

# vLLM's LoRAConfig accepts these ranks only.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_MAX_LORAS = 4
DEFAULT_MAX_CPU_LORAS = 32
_DEFAULT_RANK = 16
_RANK, _PER_STEP, _IN_TOTAL = "max_lora_rank", "max_loras", "max_cpu_loras"
_ENABLE = "enable_lora"


def engine_part(options: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in options.items() if name.partition(".")[0] not in API_ONLY
    }


def check_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options by vLLM's names, after checking names and bounds.

    A dotted name such as ``speculative_config.method`` sets one key of an option with several.

    Raises:
        UsageError: a name is unknown, belongs to gpupool, or is given twice; a text is too long.
        Refused: a number has more than 64 bits or is not finite; a text is no Unicode.
    """
    if len(options) > MAX_OPTIONS:
        raise UsageError(
            f"{len(options)} engine options are given, more than {MAX_OPTIONS}",
            "put related options into one JSON value",
        )
    checked: dict[str, str] = {}
    for given, value in options.items():
        name = _checked_name(given)
        if name in checked:
            raise UsageError(f"the engine option {name!r} is given twice", "give one value")
        if len(value) > MAX_VALUE_CHARACTERS or "\0" in value:
            raise UsageError(
                f"the value of the engine option {name!r} has {len(value):,} characters, more than "
                f"{MAX_VALUE_CHARACTERS:,}, or a null character",
                "give a shorter text",
            )
        check_json_text(f"the engine option {name!r}", value)
        checked[name] = value
    for name in checked:
        whole = name.partition(".")[0]
        if whole != name and whole in checked:
            raise UsageError(
                f"the engine options {whole!r} and {name!r} exclude each other",
                "give all keys as one JSON value, or each key by its dotted name",
            )
    return checked


def _checked_name(given: str) -> str:
    first, dot, keys = given.strip().removeprefix("--").partition(".")
    whole = first.replace("-", "_")
    name = f"{whole}{dot}{keys}"
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{given[:80]!r} is not the name of an engine option",
            "use names of vLLM's arguments, such as max-num-seqs",
        )
    if whole in REFUSED:
        raise UsageError(f"the engine option {whole!r} cannot be given", REFUSED[whole])
    if whole not in OFFERED:
        near = difflib.get_close_matches(whole, OFFERED, n=3, cutoff=0.6)
        raise UsageError(
            f"vLLM has no engine option {whole!r}",
            f"similar: {', '.join(near)}" if near else ENGINE_HELP,
        )
    return name


def takes_adapters(options: Mapping[str, str]) -> bool:
    """Return whether an engine with these options takes adapters.

    An engine takes adapters if its options have ``max_lora_rank`` or ``max_loras``.
    """
    return _RANK in options or _PER_STEP in options


def with_adapter_support(options: Mapping[str, str]) -> dict[str, str]:
    """Return an engine's options with the defaults and the switch for adapters, if it takes any."""
    if not takes_adapters(options):
        return dict(options)
    per_step = _number(options, _PER_STEP, DEFAULT_MAX_LORAS)
    defaults = {
        _RANK: str(_DEFAULT_RANK),
        _PER_STEP: str(per_step),
        _IN_TOTAL: str(max(per_step, DEFAULT_MAX_CPU_LORAS)),
    }
    return {**defaults, **options, _ENABLE: "true"}


def without_adapter_support(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options that have an effect on the weights of an engine without adapters."""
    ours = (_ENABLE, _RANK, _PER_STEP, _IN_TOTAL)
    return {name: value for name, value in options.items() if name not in ours}


def options_for(options: Mapping[str, str], rank: int) -> dict[str, str]:
    """Return the options to change so that an engine takes adapters of ``rank``; maybe none."""
    if takes_adapters(options) and rank <= _number(options, _RANK, _DEFAULT_RANK):
        return {}
    least = _DEFAULT_RANK if not takes_adapters(options) else 1
    needed = min(size for size in RANKS if size >= max(rank, least))
    changes = {_RANK: str(needed)}
    if _PER_STEP not in options:
        changes[_PER_STEP] = str(DEFAULT_MAX_LORAS)
    return changes


def num_slots(options: Mapping[str, str]) -> int:
    """Return the number of adapters in one step, 0 for an engine without adapters."""
    return _number(options, _PER_STEP, DEFAULT_MAX_LORAS) if takes_adapters(options) else 0


def max_rank(options: Mapping[str, str]) -> int:
    return _number(options, _RANK, _DEFAULT_RANK)


def check_num_adapters(model: str, options: Mapping[str, str], num_adapters: int) -> None:
    """Check that a model may have ``num_adapters``.

    Raises Refused: there are too many for the engine.
    """
    limit = _number(with_adapter_support(options), _IN_TOTAL, DEFAULT_MAX_CPU_LORAS)
    if num_adapters > limit:
        raise Refused(
            f"{model} would have {num_adapters} adapters, and its engine keeps at most {limit}",
            f"remove an adapter, or `gpupool set {model} --engine max-cpu-loras={num_adapters}`",
        )


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    """Return an option's number; the default if the text is wrong, which vLLM's parser reports."""
    text = options.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default
