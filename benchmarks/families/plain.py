"""vLLM alone in a process: engines of several models, asked over pipes.

The engines have gpupool's CPU kernels and nothing else of gpupool: linear layers without oneDNN,
and the corrected rotary embedding.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from benchmarks.families.prompts import Prompt, decoded_features, encoded_features
from tests.functional.images import picture
from tests.functional.worker_peer import encode_request

ENGINE_ARGUMENTS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 512,
    "block_size": 32,
    "kv_cache_memory_bytes": 24 << 20,
    "mm_processor_cache_gb": 0,  # then all features of a prompt's images are in its request
}
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


_RANK = "benchmarks.families.plain_rank.PlainRank"
_NUM_COMPARED = 48  # tokens of answers about two images

# vLLM's own error for a model class that cannot be imported does not name the missing package.
_IMPORT_ERROR = re.compile(r"(?:ModuleNotFoundError|ImportError): [^\n]+")
# The error of a rank, which the engine's own error does not repeat.
_RANK_ERROR = re.compile(r"ERROR [^\n\]]*\] (\w+Error: [^\n]+)")


class VllmCannot(Exception):
    """vLLM alone does not serve the family on this machine; the text is vLLM's reason."""


class PlainVllm:
    """The process, started by ``with``; calls wait for the answer."""

    def __init__(self, log_path: Path, num_gpus: int = 1) -> None:
        """``num_gpus`` is the degree of tensor parallelism."""
        self._log_path = log_path
        self._num_gpus = num_gpus

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
        self._process.kill()  # the ranks end with the process
        self._process.communicate()
        self._log.close()

    def load(self, name: str, path: Path, dtype: str, **options: Any) -> None:
        """Load a model, with further engine arguments.

        Raises:
            VllmCannot: vLLM cannot serve the model.
        """
        options |= {"tensor_parallel_size": self._num_gpus}
        if self._num_gpus > 1:
            options |= {"worker_extension_cls": _RANK}
        self._call("load", name=name, path=str(path), dtype=dtype, options=options)

    def with_image(self, name: str, prompt: Prompt, image_text: str, seed: int) -> Prompt:
        """Return a prompt with ``image_text`` in the middle, as vLLM's processor expands this text
        for an image of random pixels.

        Raises:
            VllmCannot: the processor or the engine failed.
            ValueError: another image has the same answer, so that the image would test nothing.
        """
        found = []
        for one in (seed, seed + 1000):
            arguments = {"prompt": prompt, "image_text": image_text, "seed": one}
            token_ids, features = self._call("render", name=name, **arguments)
            found.append(Prompt(token_ids, tuple(features)))
        first, other = self.answers(name, found, _NUM_COMPARED)
        if first == other:
            raise ValueError(f"{name}: the answer does not depend on the image")
        return found[0]

    def answer(self, name: str, prompt: Prompt, num_tokens: int) -> list[int]:
        """Return the greedy tokens after a prompt that is alone in its batch.

        Raises:
            VllmCannot: the engine failed.
        """
        return self.answers(name, [prompt], num_tokens)[0]

    def answers(self, name: str, prompts: list[Prompt], num_tokens: int) -> list[list[int]]:
        """Return the greedy tokens after prompts in one batch.

        Raises:
            VllmCannot: the engine failed.
        """
        found: list[list[int]] = self._call(
            "answers", name=name, prompts=prompts, num_tokens=num_tokens
        )
        return found

    def pool(self, name: str, prompt: Prompt, task: str) -> list[float]:
        """Return the numbers of a pooling model for a prompt.

        Raises:
            VllmCannot: the engine failed.
        """
        numbers: list[float] = self._call("pool", name=name, prompt=prompt.token_ids, task=task)
        return numbers

    def _call(self, method: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        said_before = self._log_path.stat().st_size
        line = self._process.stdout.readline()
        if not line:
            raise VllmCannot(f"the process ended with status {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            with self._log_path.open("rb") as log:
                log.seek(said_before)
                said = log.read().decode(errors="replace")
            found = _IMPORT_ERROR.search(said) or _RANK_ERROR.search(said)
            raise VllmCannot(reply["error"] if found is None else found[found.lastindex or 0])
        return reply["result"]


class _Engines:
    """The engines inside the process."""

    def __init__(self) -> None:
        self._cores: dict[str, Any] = {}
        self._num_asked = 0
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder

        self._decoder = MsgpackDecoder(EngineCoreRequest)

    def load(self, name: str, path: str, dtype: str, options: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        args = EngineArgs(model=path, dtype=dtype, **(ENGINE_ARGUMENTS | options))
        config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        self._cores[name] = EngineCore(config, Executor.get_class(config), log_stats=False)

    def render(self, name: str, prompt: Any, image_text: str, seed: int) -> Prompt:
        from vllm import SamplingParams
        from vllm.v1.engine.input_processor import InputProcessor

        processor = InputProcessor(self._cores[name].vllm_config)
        token_ids, _ = prompt
        middle = len(token_ids) // 2
        image = processor.get_tokenizer().encode(image_text, add_special_tokens=False)
        unexpanded: Any = {
            "prompt_token_ids": [*token_ids[:middle], *image, *token_ids[middle:]],
            "multi_modal_data": {"image": [picture(seed)]},
        }
        request = processor.process_inputs("", unexpanded, SamplingParams(), ("generate",))
        assert request.prompt_token_ids is not None
        return Prompt(request.prompt_token_ids, encoded_features(request.mm_features))

    def answers(self, name: str, prompts: list[Any], num_tokens: int) -> list[list[int]]:
        core = self._cores[name]
        found: dict[str, list[int]] = {}
        for token_ids, features in prompts:
            self._num_asked += 1
            request_id = str(self._num_asked)
            found[request_id] = []
            # With the salt no request finds the prefix of another one.
            frames = encode_request(
                request_id,
                token_ids,
                request_id,
                mm_features=decoded_features(tuple(features)),
                max_tokens=num_tokens,
            )
            core.add_request(*core.preprocess_add_request(self._decoder.decode(frames)))
        while core.scheduler.has_requests():
            outputs, _ = core.step_fn()
            for of_client in (outputs or {}).values():
                for output in of_client.outputs:
                    found[output.request_id] += output.new_token_ids
        return list(found.values())

    def pool(self, name: str, prompt: list[int], task: str) -> list[float]:
        core = self._cores[name]
        self._num_asked += 1
        frames = encode_request(str(self._num_asked), prompt, task=task)
        core.add_request(*core.preprocess_add_request(self._decoder.decode(frames)))
        while core.scheduler.has_requests():
            outputs, _ = core.step_fn()
            for of_client in (outputs or {}).values():
                for output in of_client.outputs:
                    return [float(one) for one in output.pooling_output.flatten()]
        raise RuntimeError("the engine has no answer")


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

    from gpupoold.worker.engine.cpu_build import adapt_cpu_build

    torch.set_num_threads(1)
    adapt_cpu_build()
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
