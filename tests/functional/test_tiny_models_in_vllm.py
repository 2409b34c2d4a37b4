"""vLLM runs every tiny checkpoint, and its greedy text is fit to compare runs by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROMPTS = ("def foo(self):\n    return", "import os\nimport sys\n", "Hello, who are you?")
NUM_TOKENS = 128
EOS_ID = 2


@pytest.fixture(scope="module")
def greedy(tiny_models: dict[str, Path], project_env: dict[str, str]) -> dict[str, Any]:
    """Per model, the tokens of each prompt: all in one batch, then each alone."""
    command = [sys.executable, __file__, *map(str, tiny_models.values())]
    env = project_env | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mixtral", "tiny-qwen2", "tiny-qwen3"])
def test_greedy_text(name: str, greedy: dict[str, Any]) -> None:
    batched, alone = greedy[name]["batched"], greedy[name]["alone"]
    assert batched == alone, "who shares the batch must not change float32 greedy tokens"
    for tokens in batched:
        assert len(tokens) == NUM_TOKENS, "ended early"
        assert EOS_ID not in tokens
        assert len(set(tokens[-64:])) > 32, "greedy text fell into a short loop"
    assert len({tuple(tokens[:8]) for tokens in batched}) == len(PROMPTS), "prompt has no effect"
    assert all(text.isascii() for text in greedy[name]["texts"])


def _greedy_of(path: str) -> dict[str, Any]:
    from transformers import AutoTokenizer
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    args = EngineArgs(
        model=path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        enable_prefix_caching=False,
    )
    config = args.create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    batched = answers(core, prompts)
    alone = [answers(core, [prompt])[0] for prompt in prompts]
    core.shutdown()
    return {"batched": batched, "alone": alone, "texts": tokenizer.batch_decode(batched)}


def answers(core: Any, prompts: list[list[int]], max_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """The greedy tokens of vLLM's engine for prompts in one batch."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    for index, prompt in enumerate(prompts):
        request = EngineCoreRequest(
            request_id=str(index),
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(temperature=0, max_tokens=max_tokens),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        core.add_request(*core.preprocess_add_request(request))
    found: list[list[int]] = [[] for _ in prompts]
    while core.scheduler.has_requests():
        outputs, _ = core.step_fn()
        for client_outputs in (outputs or {}).values():
            for output in client_outputs.outputs:
                found[int(output.request_id)].extend(output.new_token_ids)
    return found


if __name__ == "__main__":
    print(json.dumps({Path(path).name: _greedy_of(path) for path in sys.argv[1:]}), flush=True)
    os._exit(0)  # vLLM's exit handlers are not under test
