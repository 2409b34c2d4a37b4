"""The checks that ``check_bundle`` runs inside the environment to check."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ENGINE_MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.vllm_flash_attn",
    "vllm.v1.sample.ops.topk_topp_sampler",
    "vllm.v1.worker.gpu.sample.sampler",
    "vllm.model_executor.determinism.batch_invariant",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.mixtral",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.layers.quantization.auto_awq",
    "vllm.model_executor.layers.quantization.auto_gptq",
    "vllm.model_executor.layers.quantization.fp8",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.v1.attention.backends.mla.flashmla",
    "vllm.v1.spec_decode.eagle",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.compilation.backends",
    "vllm.compilation.cuda_graph",
    "vllm.device_allocator.cumem",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.app",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.cli.main",
)
PACKAGES = ("gpupoold", "gpupool_cli", "gpupool_state", "gpupool_tui")
# Operators called by forward passes of Llama, Qwen2 and Qwen3 in bf16 and by the code around, of
# quantised models, of mixtures of experts, and of latent attention.
OPERATORS = (
    "_C::rms_norm",
    "_C::fused_add_rms_norm",
    "_C::rotary_embedding",
    "_C::fused_qk_norm_rope",
    "_C::silu_and_mul",
    "_C::merge_attn_states",
    "_C::apply_repetition_penalties_",
    "_C::weak_ref_tensor",
    "_C::get_cuda_view_from_cpu_tensor",
    "_C::marlin_gemm",
    "_C::gptq_marlin_repack",
    "_C::awq_marlin_repack",
    "_C::machete_mm",
    "_C::cutlass_scaled_mm",
    "_C::static_scaled_fp8_quant",
    "_C::dynamic_per_token_scaled_fp8_quant",
    "_C::dynamic_scaled_int8_quant",
    "_C_cache_ops::reshape_and_cache_flash",
    "_C_cache_ops::concat_and_cache_mla",
    "_C_cache_ops::swap_blocks",
    "_C_cuda_utils::get_device_attribute",
    "_moe_C::topk_softmax",
    "_moe_C::moe_align_block_size",
    "_moe_C::moe_wna16_marlin_gemm",
    "_flashmla_C::dense_decode_fwd",
    "_vllm_fa3_C::fwd",
    "_vllm_fa3_C::get_scheduler_metadata",
)
# Top-k and top-p without FlashInfer.
SAMPLING_KERNELS = ("_topk_topp", "_topp_split_stats", "_topp_split_step", "_topp_split_mask")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def check_versions() -> str:
    """The engine's version is the one that gpupool works with; the rest is told."""
    import torch
    import vllm

    from gpupoold.engine_versions import check_engine_version

    check_engine_version()
    assert importlib.metadata.version("vllm") == vllm.__version__
    others = [f"{name} {importlib.metadata.version(name)}" for name in ("triton", "transformers")]
    return ", ".join([f"vllm {vllm.__version__}", f"torch {torch.__version__}", *others])


def check_engine_imports() -> str:
    """The engine core, both model runners, attention, the API layer."""
    for name in ENGINE_MODULES:
        importlib.import_module(name)
    return f"{len(ENGINE_MODULES)} modules"


def check_own_imports() -> str:
    """Every module of gpupool but those that are programs."""
    count = 0
    for name in PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
                count += 1
    return f"{count} modules"


def check_tests() -> str:
    """The tests that want a GPU are found, with the options of pyproject.toml."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--collect-only"]
    result = subprocess.run(
        [*command, "-m", "gpu", "tests/gpu"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip().splitlines()[-1]


def check_operators() -> str:
    """The compiled libraries load, and register what models call."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    importlib.import_module("vllm.cumem_allocator")
    importlib.import_module("vllm.vllm_flash_attn")
    importlib.import_module("vllm._flashmla_C")
    importlib.import_module("vllm._flashmla_extension_C")
    known = {schema.name for schema in torch._C._jit_get_all_schemas()}
    missing = [name for name in OPERATORS if name not in known]
    assert not missing, f"not registered: {', '.join(missing)}"
    counts: dict[str, int] = {}
    for space in sorted({name.partition("::")[0] for name in OPERATORS}):
        counts[space] = sum(name.startswith(f"{space}::") for name in known)
    return ", ".join(f"{count} of {space}" for space, count in counts.items())


def check_plugins() -> str:
    """vLLM's own plugins load; gpupool's is for its CPU build."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert found, "vLLM's metadata has no entry points"
    return ", ".join(sorted(one.name for one in found))


def check_choices() -> str:
    """On Hopper a bf16 model gets what the bundle carries, and nothing of FlashInfer."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sampler_supported

    told = set()
    for config in _configs():
        with set_current_vllm_config(config):
            backend = get_attn_backend(128, config.model_config.dtype, None).get_name()
            version = get_flash_attn_version(head_size=128)
        executor = Executor.get_class(config).__name__
        runner = 2 if config.use_v2_model_runner else 1
        compiled = config.compilation_config
        told.add(
            f"{backend} {version}, runner {runner}, {executor}, mode {compiled.mode.name}, "
            f"graphs {compiled.cudagraph_mode.name}"
        )
    assert len(told) == 1, f"architectures differ: {told}"
    choice = told.pop()
    assert choice.startswith("FLASH_ATTN 3, runner 2"), choice
    assert not flashinfer_sampler_supported()
    return choice


def check_kernels() -> str:
    """The machine's Triton compiles vLLM's sampling kernels for Hopper, with a GPU or without."""
    import torch
    from triton.runtime import driver
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform

    with contextlib.ExitStack() as stack:
        if not _has_gpu():
            driver.set_active(_Hopper())
            platform = type(current_platform)
            shown = [
                (torch.accelerator, "current_device_index", 0),
                (platform, "num_compute_units", 132),
            ]
            for owner, name, value in shown:
                stack.enter_context(mock.patch.object(owner, name, return_value=value))
        config = next(_configs())
        stack.enter_context(set_current_vllm_config(config))
        from vllm.v1.sample.ops import topk_topp_triton

        for name in SAMPLING_KERNELS:
            kernel = getattr(topk_topp_triton, name)
            kernel.compile_many(kernel.get_warmup_keys(vllm_config=config)[:1])
    return f"{len(SAMPLING_KERNELS)} compiled"


def _has_gpu() -> bool:
    """Return whether a driver answers: torch asks the management library, which may be a
    stand-in."""
    driver = ctypes.CDLL("libcuda.so.1")
    return hasattr(driver, "cuInit") and driver.cuInit(0) == 0


class _Hopper:
    """What Triton asks its driver for while it compiles."""

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """Nothing is launched on it."""
        return 0

    def get_current_target(self) -> Any:
        """Compute capability 9.0, warps of 32 threads."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def _configs() -> Iterator[Any]:
    """What the worker asks vLLM for, of a model of each architecture."""
    from vllm.engine.arg_utils import EngineArgs

    for kind, architecture in ARCHITECTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            config = {**_CONFIG, "model_type": kind, "architectures": [architecture]}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            yield EngineArgs(
                model=folder,
                skip_tokenizer_init=True,
                gpu_memory_utilization=0.001,
                async_scheduling=False,
                worker_cls="gpupoold.worker.engine.gpu_worker.CudaWorker",
                scheduler_cls="gpupoold.worker.engine.scheduler.PooledScheduler",
            ).create_engine_config()


CHECKS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("engine", check_engine_imports),
    ("gpupool", check_own_imports),
    ("tests", check_tests),
    ("versions", check_versions),
    ("operators", check_operators),
    ("plugins", check_plugins),
    ("choices", check_choices),
    ("kernels", check_kernels),
)


def main() -> int:
    """Run all checks; exit code 1 when one fails."""
    from gpupoold.worker.process import set_engine_environment

    set_engine_environment("error")
    num_failed = 0
    with tempfile.TemporaryDirectory(prefix="gpupool-triton-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # an empty cache, so that kernels are compiled
        for name, check in CHECKS:
            started_s = time.monotonic()
            try:
                line = check()
            except Exception as error:  # later checks run too, to report all problems
                num_failed += 1
                line = f"FAILED: {type(error).__name__}: {error}"
            print(f"{name:10} {line} ({time.monotonic() - started_s:.1f} s)", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # exit handlers of the libraries crash without a device
