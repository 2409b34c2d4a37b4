"""Grammars of an engine's requests: vLLM's manager with three changes.

A request's grammar is compiled by the backend chosen for the request. In vLLM 0.32 the backend of
the first grammar compiles all later grammars too, although backends differ in how they read a
schema; vLLM 0.33 refuses later grammars for other backends.

The memory of xgrammar's compiled grammars is bounded for all engines of the process together.

Calls of grammars are bounded in CPU time (:mod:`gpupoold.worker.engine.bounded_grammars`). A
request over a bound ends alone.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from gpupoold.grammar_backends import compiled_bytes, grammar_digest, make_backend, renew_compilers
from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.system.process import GRAMMAR_NICENESS, lower_priority, trim_heap
from gpupoold.worker.engine.bounded_grammars import (
    MAX_ABANDONED,
    MAX_ABANDONED_OF_KEY,
    BoundedGrammar,
    GrammarCalls,
    GrammarOverBound,
    put_off,
)

CACHE_BYTES = 16 << 20
"""Limit in bytes of compiled grammars for all engines of a process, by xgrammar's count.

The real memory is two to three times as large.
"""


class GrammarCaches:
    """The caches of all engines of a process, within one limit in bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._caches: OrderedDict[_Backend, None] = OrderedDict()  # the latest used last
        self._lock = threading.Lock()

    def used(self, cache: _Backend) -> None:
        """Record a use; renew the least recently used caches while the total is over the limit."""
        with self._lock:
            self._caches[cache] = None
            self._caches.move_to_end(cache)
            sizes = [(cache, cache.num_bytes) for cache in self._caches]
            total = sum(num_bytes for _, num_bytes in sizes)
            for backend, num_bytes in sizes:
                if total <= self._limit_bytes:
                    return
                backend.renew()
                total -= num_bytes

    def forget(self, cache: _Backend) -> None:
        with self._lock:
            self._caches.pop(cache, None)


_caches = GrammarCaches(CACHE_BYTES)
_calls = GrammarCalls()
_first_calls = GrammarCalls()  # of compiling threads, one at a time
_first_calls_lock = threading.Lock()
_MAX_KNOWN = 256
_NUM_THREADS = max(1, (os.cpu_count() or 1) // 2)
"""Compiling threads of a backend, as of vLLM's manager."""


class GrammarRefusal(NamedTuple):
    """Why a request's grammar is refused.

    ``digest`` names the grammar to the frontends. ``is_final``: the reason lies in the grammar, and
    not in others' at this time.
    """

    reason: str
    digest: str = ""
    is_final: bool = True


@dataclass(eq=False, slots=True)
class _Backend:
    """A backend of one engine, with the cache of its compiler, and compiling threads of its own.

    A costly grammar delays no grammar of another backend. The first compiling thread makes the
    backend; vLLM would make the backend between two steps.
    """

    name: str
    executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_NUM_THREADS))
    backend: Any = None
    making: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached grammars by the compiler's count."""
        return compiled_bytes(self.backend)

    def renew(self) -> None:
        """Empty the cache; requests keep the grammars in use."""
        renew_compilers(self.backend)
        trim_heap()


class EngineGrammars(StructuredOutputManager):
    """vLLM's manager for one engine, with several backends; requests are in the activity page.

    After a call over its bound, all requests of the same owner with an equal grammar are refused,
    because each would cost as much. The owner is the first part of a request's cache salt, the id
    of its API key.
    """

    _grammar_bitmask: Any

    def __init__(self, config: VllmConfig, model: str) -> None:
        super().__init__(config)
        self.model = model
        self._by_backend: dict[str, _Backend] = {}
        self._refused: dict[str, GrammarRefusal] = {}
        self._turn = 0
        self._known: OrderedDict[bytes, str] = OrderedDict()  # reasons by owner and grammar
        # Masks are filled beside the step in any case, on one thread.
        self.fill_bitmask_parallel_threshold = config.scheduler_config.max_num_seqs

    def grammar_init(self, request: Request) -> None:
        """Begin to compile a request's grammar with the request's backend."""
        structured = request.sampling_params and request.sampling_params.structured_outputs
        if request.structured_output_request is None or not structured:
            return
        backend = self._backend_of(request)
        compiling = backend.executor.submit(self._compile, request, backend)
        request.structured_output_request.grammar = compiling

    def _backend_of(self, request: Request) -> _Backend:
        assert request.sampling_params is not None
        name = str(request.sampling_params.structured_outputs._backend)
        if name not in self._by_backend:
            self._by_backend[name] = _Backend(name)
        return self._by_backend[name]

    def _compile(self, request: Request, made: _Backend) -> StructuredOutputGrammar:
        lower_priority(GRAMMAR_NICENESS)  # this thread only compiles
        with WORKER.beside(ThreadPhase.GRAMMAR, self.model, [request.request_id]):
            with made.making:
                if made.backend is None:
                    made.backend = make_backend(made.name, self.vllm_config, self.tokenizer)
                    self.backend = made.backend  # all backends make equal bitmasks
            # vLLM's method uses the manager's backend only.
            create: Any = StructuredOutputManager._create_grammar
            grammar = self.bounded(request, partial(create, made))
            self.prepare(request, grammar)
        if made.name == "xgrammar":
            _caches.used(made)
        return grammar

    def bounded(self, request: Request, compile_grammar: Any) -> BoundedGrammar:
        """Return a request's compiled grammar; for a compiling thread.

        Raises:
            GrammarOverBound: the grammar is known to be over a bound.
            Exception: the grammar cannot be compiled.
        """
        digest = grammar_digest(request.sampling_params.structured_outputs)
        salt = (request.cache_salt or "").partition(":")[0]
        owner = hashlib.sha256(f"{salt}:{digest}".encode("utf-8", "surrogatepass")).digest()
        refusal = GrammarRefusal(self._known[owner]) if owner in self._known else _too_many(salt)
        if refusal is not None:
            self._refused[request.request_id] = refusal
            raise GrammarOverBound(refusal.reason)
        return BoundedGrammar(compile_grammar(request), owner, salt)

    def prepare(self, request: Request, grammar: BoundedGrammar) -> None:
        """Make the next mask of a request's grammar; for a compiling thread.

        Raises:
            GrammarOverBound: the grammar is over a bound.
        """
        num_words = cdiv(self.vllm_config.model_config.get_vocab_size(), 32)
        row = torch.empty((1, num_words), dtype=torch.int32)

        def make() -> None:
            lower_priority(GRAMMAR_NICENESS)
            grammar.prepare(row)

        with _first_calls_lock:
            _first_calls.run(make)
        if grammar.refusal:
            self._refuse(request, grammar)
            raise GrammarOverBound(grammar.refusal)

    def put_off(self, requests: Iterable[Request]) -> set[str]:
        """Return who of the running requests sits out the next step, for costly grammars."""
        grammars = {
            request.request_id: grammar
            for request in requests
            if request.structured_output_request is not None  # each step asks this of all requests
            and (grammar := _grammar_of(request)) is not None
        }
        if not grammars:
            return set()
        self._turn += 1
        return put_off(grammars, self._turn)

    def take_up(self, request: Request) -> bool:
        """Return whether a resumed request's compiled grammar has taken the answer's tokens.

        If not, the tokens are taken on a compiling thread, and the grammar is not ready meanwhile.
        """
        grammar = _grammar_of(request)
        if grammar is None or grammar.has_taken_up:
            return True
        grammar.has_taken_up = True
        structured = request.structured_output_request
        assert structured is not None
        executor = self._backend_of(request).executor
        structured.grammar = executor.submit(self._take_all, request, grammar)
        return False

    def _take_all(self, request: Request, grammar: BoundedGrammar) -> StructuredOutputGrammar:
        """Take the tokens of a resumed answer, as if each had just been sampled."""
        with WORKER.beside(ThreadPhase.GRAMMAR, self.model, [request.request_id]):
            self.walk(request, grammar)
            self.prepare(request, grammar)
        return grammar

    def walk(self, request: Request, grammar: BoundedGrammar) -> None:
        """Take the tokens of a resumed answer, those after the reasoning.

        vLLM would search the end of the reasoning in all tokens at once, in quadratic time.

        Raises:
            GrammarOverBound: the grammar is over a bound.
        """
        structured: Any = request.structured_output_request
        so_far: Any = SimpleNamespace(
            structured_output_request=structured,
            prompt_token_ids=request.prompt_token_ids,
            all_token_ids=list(request.prompt_token_ids or ()),
        )
        for token in list(request.output_token_ids):
            so_far.all_token_ids.append(token)
            bounds = self._get_constraint_bounds(so_far, [token], spec_tokens_committed=True)
            if bounds.grammar_start <= 1:
                structured.reasoning_ended = True
                grammar.accept_tokens("", [token][bounds.grammar_start :])
        try:
            grammar.take_all()
        except GrammarOverBound:
            self._refuse(request, grammar)
            raise

    def grammar_bitmask(self, requests: dict[str, Request], ids: list[str], drafts: Any) -> Any:
        """Return the masks of a step; requests over a bound are not constrained, and end."""
        if not ids:
            return None
        asking = [requests[request_id] for request_id in ids]

        def go_on() -> None:
            self._make_masks()  # the abandoned thread may still write to the old ones
            self._refuse_equal(asking)

        if self._grammar_bitmask is None:
            self._make_masks()
        mask = _calls.run(partial(super().grammar_bitmask, requests, ids, drafts), go_on)
        self._note_refused(asking)
        return mask

    def _make_masks(self) -> None:
        """Allocate the masks on the thread of the steps, which has the device's context."""
        assert self.backend is not None
        num_each = 1 + self.vllm_config.num_speculative_tokens
        num_rows = self.vllm_config.scheduler_config.max_num_seqs * num_each
        self._grammar_bitmask = self.backend.allocate_token_bitmask(num_rows)

    def validate_tokens(self, request: Request, spec_tokens: list[int]) -> list[int]:
        """Return the longest unconstrained or permitted prefix of a draft."""
        if not request.use_structured_output:
            return spec_tokens
        found = _calls.run(partial(super().validate_tokens, request, spec_tokens))
        self._note_refused([request])
        return found

    def take_refused(self) -> dict[str, GrammarRefusal]:
        """Return the requests refused since the last call by id; they must be ended."""
        if not self._refused:
            return {}
        refused, self._refused = self._refused, {}
        return refused

    def _note_refused(self, requests: Iterable[Request]) -> None:
        for request in requests:
            grammar = _grammar_of(request)
            if grammar is not None and grammar.refusal:
                self._refuse(request, grammar)

    def _refuse(self, request: Request, grammar: BoundedGrammar) -> None:
        assert request.sampling_params is not None
        constraint = request.sampling_params.structured_outputs
        self._refused[request.request_id] = GrammarRefusal(
            grammar.refusal,
            grammar_digest(constraint) if grammar.is_final else "",
            grammar.is_final,
        )
        if grammar.is_slow_call:
            self._known[grammar.owner] = grammar.refusal
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def _refuse_equal(self, requests: Iterable[Request]) -> None:
        """Refuse the grammars that are equal to one whose call the step has left."""
        grammars = [grammar for grammar in map(_grammar_of, requests) if grammar is not None]
        left = {one.owner: one for one in grammars if one.is_slow_call or not one.is_final}
        for grammar in grammars:
            if not grammar.refusal and (equal := left.get(grammar.owner)):
                grammar.refusal, grammar.is_final = equal.refusal, equal.is_final

    def clear_backend(self) -> None:
        """End the backends and the compiling threads after their present work.

        Returns at once: compiling takes up to seconds and cannot be stopped, and other engines'
        steps continue meanwhile.
        """
        self.backend = None  # one of those that end
        if not self._by_backend:
            super().clear_backend()
            return
        for backend in self._by_backend.values():
            backend.executor.shutdown(wait=False, cancel_futures=True)
        threading.Thread(target=self._end, name="grammars-end", daemon=True).start()

    def _end(self) -> None:
        for backend in self._by_backend.values():
            backend.executor.shutdown()
            _caches.forget(backend)  # threads of other engines read the size of each cache
            if backend.backend is not None:
                backend.backend.destroy()
        self._by_backend.clear()
        super().clear_backend()


def _too_many(key: str) -> GrammarRefusal | None:
    """Return why no further grammar of an API key is accepted at present, if none is."""
    keys = [*_calls.abandoned_keys(), *_first_calls.abandoned_keys()]
    if key and keys.count(key) >= MAX_ABANDONED_OF_KEY:
        whose = "Grammars of this key take"
    elif len(keys) >= MAX_ABANDONED:
        whose = "Other grammars take"
    else:
        return None
    reason = f"{whose} more CPU time than they may; please try again later."
    return GrammarRefusal(reason, is_final=False)


def _grammar_of(request: Request) -> BoundedGrammar | None:
    structured = request.structured_output_request
    grammar = None if structured is None else structured.grammar
    return grammar if isinstance(grammar, BoundedGrammar) else None


def use_grammars(core: Any, grammars: EngineGrammars) -> None:
    """Replace the manager of an ``EngineCore``, which has no option for a manager."""
    core.structured_output_manager = core.scheduler.structured_output_manager = grammars
    core.scheduler.grammars = grammars
