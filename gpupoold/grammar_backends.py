"""vLLM's backends for grammars, used by workers and by processes that test grammars."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import llguidance
import xgrammar
from vllm.config import VllmConfig
from vllm.v1.structured_output.backend_guidance import (
    GuidanceBackend,
    GuidanceGrammar,
    serialize_guidance_grammar,
)
from vllm.v1.structured_output.backend_outlines import OutlinesBackend
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

_MAX_ITEMS = 500


class _BoundedGuidance(GuidanceBackend):  # type: ignore[misc, unused-ignore]
    """guidance with another limit of the parser's items, for grammars in a text of the client.

    The time for a token grows with the square of the items, to 7 s with guidance's own limit of
    2,000, during which no other thread of the process runs.
    """

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,
    ) -> StructuredOutputGrammar:
        if request_type != StructuredOutputOptions.GRAMMAR:
            return super().compile_grammar(request_type, grammar_spec, stop_token_ids)
        matcher = llguidance.LLMatcher(
            self.ll_tokenizer,
            serialize_guidance_grammar(request_type, grammar_spec),
            log_level=0,
            limits=llguidance.LLParserLimits(max_items_in_row=_MAX_ITEMS),
        )
        grammar = GuidanceGrammar(matcher, self.ll_tokenizer, self.vocab_size)
        grammar.check_error()
        return grammar


_KINDS: dict[str, Any] = {
    "xgrammar": XgrammarBackend,
    "guidance": _BoundedGuidance,
    "outlines": OutlinesBackend,
}
# vLLM 0.33 has a second compiler, for structural tags, which may name special tokens.
_COMPILERS = ("compiler", "full_vocab_compiler")
_MAX_THREADS = 8
_CORES_PER_THREAD = 4


def make_backend(name: str, config: VllmConfig, tokenizer: Any) -> Any:
    """Return a new backend; takes up to a second for a large vocabulary.

    Raises KeyError: ``name`` is not xgrammar, guidance or outlines.
    """
    size = config.model_config.get_vocab_size()
    backend = _KINDS[name](config, tokenizer=tokenizer, vocab_size=size)
    if name == "xgrammar":
        renew_compilers(backend)
    return backend


def grammar_digest(structured: Any) -> str:
    """Return a name for a request's grammar, equal for equal grammars in all processes."""
    kind, text = get_structured_output_key(structured)
    return hashlib.sha256(f"{kind.name}:{text}".encode("utf-8", "surrogatepass")).hexdigest()


def renew_compilers(backend: XgrammarBackend) -> None:
    """Give the backend new compilers.

    vLLM's compiler has 8 threads on any machine, which delay steps on few cores. And a compiler of
    xgrammar 0.2.8 keeps masks of single rules, neither counted nor cleared (half a megabyte for a
    schema of 100 fields).
    """
    renewed: dict[int, xgrammar.GrammarCompiler] = {}
    for name in _COMPILERS:
        compiler = getattr(backend, name, None)
        if compiler is None:
            continue
        if id(compiler) not in renewed:  # one compiler may have both names
            tokenizer = compiler.compile_grammar('root ::= "a"').tokenizer_info
            renewed[id(compiler)] = xgrammar.GrammarCompiler(tokenizer, max_threads=_num_threads())
        setattr(backend, name, renewed[id(compiler)])


def compiled_bytes(backend: XgrammarBackend) -> int:
    """Return the bytes of the backend's compiled grammars, by xgrammar's count."""
    found = (getattr(backend, name, None) for name in _COMPILERS)
    compilers = {id(compiler): compiler for compiler in found if compiler is not None}
    return sum(int(compiler.get_cache_size_bytes()) for compiler in compilers.values())


def _num_threads() -> int:
    num_cores = len(os.sched_getaffinity(0))
    return max(1, min(_MAX_THREADS, num_cores // _CORES_PER_THREAD))
