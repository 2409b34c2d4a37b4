"""Trial compilation of a grammar as in a worker, in a process that may die."""

from __future__ import annotations

import json
import random
import threading
import time
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers.registry import cached_get_tokenizer, cached_tokenizer_from_config
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import get_structured_output_key

from gpupoold.frontend.adapter import engine_config
from gpupoold.frontend.grammars.messages import GrammarCheck, GrammarVerdict
from gpupoold.grammar_backends import make_backend
from gpupoold.system.process import LONG_GRAMMAR_NICENESS, limit_use, lower_priority

MAX_CPU_S = 3
ORDINARY_S = 0.1
"""Limit of CPU time for an ordinary grammar, in seconds."""
MAX_MEMORY_BYTES = 1 << 30
"""Limit of address space beyond the process's present size, in bytes."""
MAX_STEP_S = 0.05
"""Limit of CPU time for the mask of one token, in seconds."""
_STACK_BYTES = 4 << 20  # half of what a worker's threads have
_NUM_TOKENS = 24
_MAX_REASON_CHARS = 500


class Prepared:
    """Shared parts of one model's checks: configuration, tokenizer, xgrammar's compiler."""

    def __init__(self, check: GrammarCheck) -> None:
        self.config: VllmConfig = engine_config(check.model, check.loaded)
        self.tokenizer: Any = cached_tokenizer_from_config(self.config.model_config)
        cached_get_tokenizer.cache_clear()  # the cache would keep tokenizers of all models
        self._xgrammar = make_backend("xgrammar", self.config, self.tokenizer)

    def backend(self, name: str) -> Any:
        """vLLM's backend of this name, as a worker has one."""
        if name == "xgrammar":
            return self._xgrammar
        return make_backend(name, self.config, self.tokenizer)


def try_grammar(prepared: Prepared, check: GrammarCheck) -> GrammarVerdict:
    """Validate and compile the grammar, and take some tokens; may end the process.

    Ordinary grammars take a few milliseconds. A slow one gets the lowest priority.
    """
    limit_use(MAX_CPU_S, MAX_MEMORY_BYTES)
    verdicts: list[GrammarVerdict] = []
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=lambda: verdicts.append(_verdict(prepared, check)))
    thread.start()
    thread.join(ORDINARY_S)
    while thread.is_alive():
        if time.process_time() > ORDINARY_S:
            lower_priority(LONG_GRAMMAR_NICENESS, of_all_threads=True)
        thread.join(ORDINARY_S)
    return verdicts[0]


def _verdict(prepared: Prepared, check: GrammarCheck) -> GrammarVerdict:
    try:
        backend = _compile(prepared, json.loads(check.constraint))
    except MemoryError:
        reason = f"its compilation takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
    except Exception as error:
        reason = "; ".join(str(one) or repr(one) for one in (error, error.__cause__) if one)
        if "bad_alloc" in reason:
            reason = f"its compilation takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
    else:
        return GrammarVerdict(check.check_id, "accepted", backend)
    return GrammarVerdict(check.check_id, "refused", reason=reason[:_MAX_REASON_CHARS])


def _compile(prepared: Prepared, parts: dict[str, Any]) -> str:
    """Return the backend that vLLM chooses for the grammar.

    Raises:
        Exception: the grammar cannot be used.
    """
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(**parts))
    config = prepared.config
    sampling._validate_structured_outputs(
        config.model_config, config.structured_outputs_config, prepared.tokenizer
    )
    structured = sampling.structured_outputs
    assert structured is not None and structured._backend is not None
    backend = prepared.backend(structured._backend)
    grammar = backend.compile_grammar(*get_structured_output_key(structured))
    _take_tokens(grammar, backend.allocate_token_bitmask(1))
    return structured._backend


def _take_tokens(grammar: StructuredOutputGrammar, bitmask: torch.Tensor) -> None:
    """Take random permitted tokens, as an answer would.

    Raises:
        ValueError: no token is permitted, or a step takes too long for streams of the same batch.
    """
    draw = random.Random(0)
    for index in range(_NUM_TOKENS):
        if grammar.is_terminated():
            return
        started_s = time.thread_time()
        grammar.fill_bitmask(bitmask, 0)
        taken_s = time.thread_time() - started_s
        if taken_s > MAX_STEP_S:
            raise ValueError(
                f"a step takes {taken_s * 1000:.0f} ms; the bound is {MAX_STEP_S * 1000:.0f}"
            )
        words = bitmask[0].nonzero().flatten().tolist()
        if not words and not index:
            raise ValueError("no answer matches the grammar")
        if not words:
            return
        word = draw.choice(words)
        bits = int(bitmask[0][word]) & 0xFFFFFFFF
        allowed = [bit for bit in range(32) if bits >> bit & 1]
        started_s = time.thread_time()
        if not grammar.accept_tokens("", [word * 32 + draw.choice(allowed)]):
            return
        if time.thread_time() - started_s > MAX_STEP_S:
            raise ValueError("a token takes too long to check")
