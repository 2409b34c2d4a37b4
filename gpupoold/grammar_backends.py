"""vLLM's backends for grammars, used by workers and by processes that test grammars."""

from __future__ import annotations

import os
from typing import Any

import xgrammar
from vllm.config import VllmConfig
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_outlines import OutlinesBackend
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

_KINDS: dict[str, Any] = {
    "xgrammar": XgrammarBackend,
    "guidance": GuidanceBackend,
    "outlines": OutlinesBackend,
}
_MAX_THREADS = 8
_CORES_PER_THREAD = 4


def make_backend(name: str, config: VllmConfig, tokenizer: Any) -> Any:
    """Return a new backend; takes up to a second for a large vocabulary.

    Raises:
        KeyError: ``name`` is not xgrammar, guidance or outlines.
    """
    size = config.model_config.get_vocab_size()
    backend = _KINDS[name](config, tokenizer=tokenizer, vocab_size=size)
    if name == "xgrammar":
        renew_compiler(backend)
    return backend


def renew_compiler(backend: XgrammarBackend) -> None:
    """Give the backend a new compiler.

    vLLM's compiler has 8 threads on any machine, which delay steps on few cores. And a compiler of
    xgrammar 0.2.8 keeps masks of single rules, neither counted nor cleared (half a megabyte for a
    schema of 100 fields).
    """
    tokenizer = backend.compiler.compile_grammar('root ::= "a"').tokenizer_info
    backend.compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=_num_threads())


def _num_threads() -> int:
    num_cores = len(os.sched_getaffinity(0))
    return max(1, min(_MAX_THREADS, num_cores // _CORES_PER_THREAD))
