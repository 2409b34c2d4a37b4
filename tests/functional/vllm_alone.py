"""What vLLM alone answers: a program that prints JSON. No part of gpupool serves here.

``python -m tests.functional.vllm_alone DEGREE JOBS`` where JOBS is a JSON list of ``[folder,
prompts, num_tokens]`` with prompts of token ids. The answers are greedy, in float32, one prompt
after the other, with tensor parallelism of DEGREE.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conftest import PYTHON_PATH

_TIMEOUT_S = 600
Job = tuple[Path, Sequence[list[int]], int]


def answers_alone(degree: int, jobs: Sequence[Job]) -> list[list[list[int]]]:
    """The tokens of each job's prompts, in a process of their own."""
    given = json.dumps([[str(folder), prompts, count] for folder, prompts, count in jobs])
    command = [sys.executable, "-m", "tests.functional.vllm_alone", str(degree), given]
    environment = os.environ | {
        "PYTHONPATH": PYTHON_PATH,
        "GPUPOOL_PLAIN_LINEAR": "1",  # the same kernels of linear layers
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, timeout=_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:].decode()
    made: list[list[list[int]]] = json.loads(done.stdout.splitlines()[-1])
    return made


def main() -> None:
    made = [_answers(int(sys.argv[1]), *job) for job in json.loads(sys.argv[2])]
    print(json.dumps(made), flush=True)


def _answers(degree: int, folder: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=512,
        tensor_parallel_size=degree,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    answers = [
        list(
            llm.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)[0]
            .outputs[0]
            .token_ids
        )
        for prompt in prompts
    ]
    llm.llm_engine.engine_core.shutdown()
    return answers


if __name__ == "__main__":
    main()
