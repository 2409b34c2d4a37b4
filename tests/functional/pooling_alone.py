"""What vLLM alone makes of texts: a program that prints JSON. No part of gpupool is imported.

``python -m tests.functional.pooling_alone JOBS`` where JOBS is a JSON list of ``[folder, task,
texts]`` with the task ``embed``, ``classify`` or ``score``, which ranks the other texts against
the first. One text at a time is computed.
"""

from __future__ import annotations

import json
import os
import sys

from tests.support.vllm_environment import ENVIRONMENT


def main() -> None:
    os.environ.update(ENVIRONMENT)
    made = [numbers(*job) for job in json.loads(sys.argv[1])]
    print(json.dumps(made), flush=True)
    os._exit(0)  # vLLM's ordinary end takes seconds


def numbers(folder: str, task: str, texts: list[str]) -> list[list[float]]:
    """An embedding, the classes' probabilities or a score for each text."""
    from vllm import LLM

    llm = LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=32 << 20,
        max_num_seqs=1,
    )
    if task == "embed":
        return [list(one.outputs.embedding) for one in llm.embed(texts, use_tqdm=False)]
    if task == "classify":
        return [list(one.outputs.probs) for one in llm.classify(texts, use_tqdm=False)]
    first, *others = texts
    return [[one.outputs.score] for one in llm.score(first, others, use_tqdm=False)]


if __name__ == "__main__":
    main()
