"""vLLM alone in a process: engines of several models, asked over pipes.

The process has no gpupool code in its engines except the table's engine arguments. Linear layers
use torch instead of oneDNN, as gpupool's workers do on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

ENGINE_ARGUMENTS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 512,
    "block_size": 32,
    "kv_cache_memory_bytes": 24 << 20,
    "enable_prefix_caching": False,
}
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class VllmCannot(Exception):
    """vLLM alone does not serve the family on this machine; the text is vLLM's reason."""


class PlainVllm:
    """The process, started by ``with``; calls wait for the answer."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path

    def __enter__(self) -> Self:
        self._log = self._log_path.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.families.plain"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | _ENVIRONMENT,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def load(self, name: str, path: Path, dtype: str) -> None:
        """Load a model.

        Raises:
            VllmCannot: vLLM cannot serve the model.
        """
        self._call("load", name=name, path=str(path), dtype=dtype)

    def answer(self, name: str, prompt: list[int], max_tokens: int) -> list[int]:
        """Return the greedy tokens after a prompt that is alone in its batch.

        Raises:
            VllmCannot: the engine failed.
        """
        tokens: list[int] = self._call("answer", name=name, prompt=prompt, max_tokens=max_tokens)
        return tokens

    def _call(self, method: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise VllmCannot(f"the process ended with status {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise VllmCannot(reply["error"])
        return reply["result"]


class _Engines:
    """The engines inside the process."""

    def __init__(self) -> None:
        self._cores: dict[str, Any] = {}
        self._num_asked = 0

    def load(self, name: str, path: str, dtype: str) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        args = EngineArgs(model=path, dtype=dtype, **ENGINE_ARGUMENTS)
        config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        self._cores[name] = EngineCore(config, Executor.get_class(config), log_stats=False)

    def answer(self, name: str, prompt: list[int], max_tokens: int) -> list[int]:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        core = self._cores[name]
        self._num_asked += 1
        request = EngineCoreRequest(
            request_id=f"{name}-{self._num_asked}",
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        core.add_request(*core.preprocess_add_request(request))
        tokens: list[int] = []
        while core.scheduler.has_requests():
            outputs, _ = core.step_fn()
            for of_client in (outputs or {}).values():
                for output in of_client.outputs:
                    tokens += output.new_token_ids
        return tokens


def _make_process_groups() -> None:
    """Create the groups of every kind of model; vLLM creates those of a process's first model."""
    import tempfile

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=f"file://{tempfile.mkdtemp()}/groups",
            local_rank=0,
            backend="gloo",
        )
        parallel_state.initialize_model_parallel()


def _serve() -> None:
    import torch
    import vllm._custom_ops as custom_ops

    torch.set_num_threads(1)
    custom_ops._supports_onednn = False  # the kernels of gpupool's workers
    _make_process_groups()
    # vLLM prints to stdout, which is the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engines = _Engines()
    for line in sys.stdin:
        call = json.loads(line)
        try:
            reply = {"result": getattr(engines, call["method"])(**call["arguments"])}
        except Exception as error:
            import traceback

            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve()
