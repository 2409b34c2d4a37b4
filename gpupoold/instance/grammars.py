"""The grammars of an engine's requests: vLLM's manager, with two changes.

A request's grammar is compiled by the backend that was chosen for the request. In vLLM 0.32.0
the first grammar decides for all that follow: its schema may need a backend that understands
others differently.

What xgrammar caches of compiled grammars is bounded for all engines of the process together.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Protocol

import vllm.envs
from vllm.config import VllmConfig
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from gpupoold.activity import WORKER, Phase
from gpupoold.process import yield_to_others


class Compiler(Protocol):
    """xgrammar's compiler of one engine, with its cache."""

    def get_cache_size_bytes(self) -> int:
        """Bytes of the cached grammars."""
        ...

    def clear_cache(self) -> None:
        """Drop them; those in use live on with their requests."""
        ...


class GrammarCaches:
    """The caches of all engines of a process, within one limit in bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        # By identity, the latest used last: xgrammar's cannot be hashed.
        self._compilers: OrderedDict[int, Compiler] = OrderedDict()
        self._lock = threading.Lock()

    def used(self, compiler: Compiler) -> None:
        """Note a use, and clear the caches that were used longest ago while all are too large."""
        with self._lock:
            self._compilers[id(compiler)] = compiler
            self._compilers.move_to_end(id(compiler))
            sizes = [(one, one.get_cache_size_bytes()) for one in self._compilers.values()]
            total = sum(num_bytes for _, num_bytes in sizes)
            for one, num_bytes in sizes:
                if total <= self._limit_bytes:
                    return
                one.clear_cache()
                total -= num_bytes

    def forget(self, compiler: Compiler) -> None:
        """An engine has ended."""
        with self._lock:
            self._compilers.pop(id(compiler), None)


# Each compiler bounds its own cache by the same setting.
_caches = GrammarCaches(vllm.envs.VLLM_XGRAMMAR_CACHE_MB << 20)


class _BackendGrammars(StructuredOutputManager):
    """Compiles the grammars of one backend; the activity page says for which request."""

    def __init__(self, config: VllmConfig, model: str) -> None:
        super().__init__(config)
        self._model = model

    def _create_grammar(self, request: Request) -> StructuredOutputGrammar:
        if self._use_async_grammar_compilation:
            yield_to_others()  # this thread only compiles
        with WORKER.beside(Phase.GRAMMAR, self._model, [request.request_id]):
            grammar = super()._create_grammar(request)
        compiler = getattr(self.backend, "compiler", None)
        if compiler is not None:
            _caches.used(compiler)
        return grammar

    def clear_backend(self) -> None:
        """End the backend, and the threads that compile."""
        compiler = getattr(self.backend, "compiler", None)
        super().clear_backend()
        if compiler is not None:
            _caches.forget(compiler)


class EngineGrammars(StructuredOutputManager):
    """vLLM's manager for one engine, over one for each backend that its requests name."""

    def __init__(self, config: VllmConfig, model: str) -> None:
        super().__init__(config)
        self._model = model
        self._by_backend: dict[str, _BackendGrammars] = {}

    def grammar_init(self, request: Request) -> None:
        """Begin to compile a request's grammar with the request's backend."""
        structured = request.sampling_params and request.sampling_params.structured_outputs
        if request.structured_output_request is None or not structured:
            return
        name = str(structured._backend)
        if name not in self._by_backend:
            self._by_backend[name] = _BackendGrammars(self.vllm_config, self._model)
        chosen = self._by_backend[name]
        chosen.grammar_init(request)
        self.backend = chosen.backend  # it makes the bitmask, which is alike for all

    def clear_backend(self) -> None:
        """End all backends."""
        self.backend = None  # it is one of theirs
        super().clear_backend()
        for one in self._by_backend.values():
            one.clear_backend()
        self._by_backend.clear()


def use_engine_grammars(core: Any, model: str) -> None:
    """Give an ``EngineCore`` this manager; it has no option for that."""
    grammars = EngineGrammars(core.vllm_config, model)
    core.structured_output_manager = core.scheduler.structured_output_manager = grammars
