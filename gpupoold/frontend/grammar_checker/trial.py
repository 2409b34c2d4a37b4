"""Trial compilation of a grammar as in a worker, in a process that may die."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers.registry import cached_get_tokenizer, cached_tokenizer_from_config
from vllm.v1.structured_output.request import get_structured_output_key
from vllm.v1.structured_output.utils import grammar_is_likely_lark
from xgrammar import Grammar

from gpupoold.frontend.adapter import engine_config
from gpupoold.frontend.grammar_checker.ambiguity import doubled_rule
from gpupoold.frontend.grammar_checker.walks import walk
from gpupoold.frontend.grammars.messages import GrammarCheck, GrammarVerdict
from gpupoold.grammar_backends import make_backend
from gpupoold.system.process import LONG_GRAMMAR_NICENESS, limit_use, lower_priority

MAX_CPU_S = 3
ORDINARY_S = 0.1
"""Limit of CPU time for an ordinary grammar, in seconds."""
MAX_MEMORY_BYTES = 1 << 30
"""Limit of address space beyond the process's present size, in bytes."""
_STACK_BYTES = 4 << 20  # half of what a worker's threads have
_MAX_REASON_CHARS = 500


class Prepared:
    """Shared parts of one model's checks: configuration, tokenizer, xgrammar's compiler."""

    def __init__(self, check: GrammarCheck) -> None:
        self.config: VllmConfig = engine_config(check.model, check.loaded)
        self.tokenizer: Any = cached_tokenizer_from_config(self.config.model_config)
        cached_get_tokenizer.cache_clear()  # the cache would keep tokenizers of all models
        self._xgrammar = make_backend("xgrammar", self.config, self.tokenizer)
        self.token_lengths = _token_lengths(self._xgrammar)

    def backend(self, name: str) -> Any:
        """vLLM's backend of this name, as a worker has one."""
        if name == "xgrammar":
            return self._xgrammar
        return make_backend(name, self.config, self.tokenizer)


def _token_lengths(backend: Any) -> numpy.ndarray[Any, numpy.dtype[numpy.int32]]:
    """Return the length in bytes of each token of the vocabulary by id."""
    tokens = backend.compiler.compile_grammar('root ::= "a"').tokenizer_info.decoded_vocab
    return numpy.fromiter(map(len, tokens), numpy.int32, len(tokens))


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
    if structured._backend == "xgrammar":
        _refuse_doubled_rules(structured)
    backend = prepared.backend(structured._backend)
    key = get_structured_output_key(structured)
    walk(lambda: backend.compile_grammar(*key), prepared.token_lengths)
    return structured._backend


def _refuse_doubled_rules(structured: StructuredOutputsParams) -> None:
    """Check the kinds of grammars whose rules a client may write.

    Raises:
        ValueError: a rule derives itself twice in a row.
    """
    text = structured.grammar
    if text is not None:
        is_lark = grammar_is_likely_lark(text)
        grammar = Grammar.from_lark(text) if is_lark else Grammar.from_ebnf(text)
    elif structured.structural_tag is not None and "structures" not in json.loads(
        structured.structural_tag
    ):
        grammar = Grammar.from_structural_tag(structured.structural_tag)
    else:
        return
    rule = doubled_rule(grammar.serialize_json())
    if rule is not None:
        raise ValueError(
            f"the rule `{rule}` derives itself twice in a row, so that a text matches in very many "
            "ways; write a repetition such as `(item)+` instead"
        )
