"""Grammars of an engine's requests: vLLM's manager with two changes.

A request's grammar is compiled by the backend chosen for the request. In vLLM 0.32 the backend of
the first grammar compiles all later grammars too, although backends differ in how they read a
schema; vLLM 0.33 refuses later grammars for other backends.

The memory of xgrammar's compiled grammars is bounded for all engines of the process together.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Protocol

from vllm.config import VllmConfig
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from gpupoold.grammar_backends import compiled_bytes, make_backend, renew_compilers
from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.system.process import GRAMMAR_NICENESS, lower_priority, trim_heap

CACHE_BYTES = 16 << 20
"""Limit in bytes of compiled grammars for all engines of a process, by xgrammar's count.

The real memory is two to three times as large.
"""


class GrammarCache(Protocol):
    """The cache of compiled grammars of one engine's compiler."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the grammars by the compiler's count."""
        ...

    def renew(self) -> None:
        """Empty the cache; requests keep the grammars in use."""
        ...


class GrammarCaches:
    """The caches of all engines of a process, within one limit in bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._caches: OrderedDict[GrammarCache, None] = OrderedDict()  # the latest used last
        self._lock = threading.Lock()

    def used(self, cache: GrammarCache) -> None:
        """Record a use; renew the least recently used caches while the total is over the limit."""
        with self._lock:
            self._caches[cache] = None
            self._caches.move_to_end(cache)
            sizes = [(one, one.num_bytes) for one in self._caches]
            total = sum(num_bytes for _, num_bytes in sizes)
            for one, num_bytes in sizes:
                if total <= self._limit_bytes:
                    return
                one.renew()
                total -= num_bytes

    def forget(self, cache: GrammarCache) -> None:
        with self._lock:
            self._caches.pop(cache, None)


_caches = GrammarCaches(CACHE_BYTES)


class _BackendGrammars(StructuredOutputManager):
    """A manager for one backend, which records requests in the activity page.

    A compiling thread creates the backend too; vLLM would create the backend between two steps.
    """

    backend: Any

    def __init__(self, engine: EngineGrammars, name: str) -> None:
        super().__init__(engine.vllm_config)
        self._engine = engine
        self._name = name
        self._making = threading.Lock()

    def grammar_init(self, request: Request) -> None:
        """Begin to compile a request's grammar."""
        structured = request.structured_output_request
        assert structured is not None
        structured.grammar = self.executor.submit(self._create_grammar, request)

    def _create_grammar(self, request: Request) -> StructuredOutputGrammar:
        lower_priority(GRAMMAR_NICENESS)  # this thread only compiles
        with WORKER.beside(ThreadPhase.GRAMMAR, self._engine.model, [request.request_id]):
            with self._making:
                if self.backend is None:
                    self.backend = make_backend(self._name, self.vllm_config, self.tokenizer)
                    self._engine.backend = self.backend  # all backends make equal bitmasks
            grammar = super()._create_grammar(request)
        if self._name == "xgrammar":
            _caches.used(self)
        return grammar

    @property
    def num_bytes(self) -> int:
        return compiled_bytes(self.backend)

    def renew(self) -> None:
        renew_compilers(self.backend)
        trim_heap()

    def clear_backend(self) -> None:
        """End the backend and its compiling threads after their present work.

        Returns at once: compiling takes up to seconds and cannot be stopped, and other engines'
        steps continue meanwhile.
        """
        self.executor.shutdown(wait=False, cancel_futures=True)
        threading.Thread(target=self._end, name="grammars-end", daemon=True).start()

    def _end(self) -> None:
        self.executor.shutdown()
        _caches.forget(self)  # threads of other engines read the size of each cache
        super().clear_backend()


class EngineGrammars(StructuredOutputManager):
    """vLLM's manager for one engine, over one manager per backend."""

    def __init__(self, config: VllmConfig, model: str) -> None:
        super().__init__(config)
        self.model = model
        self._by_backend: dict[str, _BackendGrammars] = {}

    def grammar_init(self, request: Request) -> None:
        """Begin to compile a request's grammar with the request's backend."""
        structured = request.sampling_params and request.sampling_params.structured_outputs
        if request.structured_output_request is None or not structured:
            return
        name = str(structured._backend)
        if name not in self._by_backend:
            self._by_backend[name] = _BackendGrammars(self, name)
        self._by_backend[name].grammar_init(request)

    def clear_backend(self) -> None:
        for one in self._by_backend.values():
            one.clear_backend()
        self._by_backend.clear()
        self.backend = None  # it belonged to a manager above
        super().clear_backend()


def use_engine_grammars(core: Any, model: str) -> None:
    """Replace the manager of an ``EngineCore``, which has no option for a manager."""
    grammars = EngineGrammars(core.vllm_config, model)
    core.structured_output_manager = core.scheduler.structured_output_manager = grammars
