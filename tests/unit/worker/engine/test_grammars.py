"""Grammars in a worker: each by its own backend, and one limit for what all engines cache."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import xgrammar
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from gpupoold.grammar_backends import make_backend
from gpupoold.worker.engine import bounded_grammars, grammars as worker_grammars
from gpupoold.worker.engine.bounded_grammars import GrammarOverBound
from gpupoold.worker.engine.grammars import EngineGrammars, GrammarCaches

LIMIT_BYTES = 300_000
NUM_WARM_UP = 20
MAX_GROWTH_BYTES = 40_000_000


class Cache:
    """A real compiler with its cache."""

    def __init__(self) -> None:
        vocabulary = [*map(chr, range(32, 127)), "</s>"]
        self._info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[len(vocabulary) - 1])
        self.renew()

    @property
    def num_bytes(self) -> int:
        return self._compiler.get_cache_size_bytes()

    def renew(self) -> None:
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1)

    def compile(self, number: int) -> None:
        self._compiler.compile_json_schema(json.dumps(schema_of(number, 10)))


def schema_of(number: int, num_fields: int) -> dict[str, Any]:
    fields = {f"p{number}_{index}": {"type": "string"} for index in range(num_fields)}
    return {"type": "object", "properties": fields}


@pytest.mark.filterwarnings("ignore")
def test_all_caches_together_are_bounded() -> None:
    made: list[Any] = [Cache() for _ in range(4)]
    caches = GrammarCaches(LIMIT_BYTES)
    totals = []
    for number in range(60):
        used = made[number % 4]
        used.compile(number)
        caches.used(used)
        totals.append(sum(one.num_bytes for one in made))
    assert max(totals) <= LIMIT_BYTES
    assert max(totals) > LIMIT_BYTES / 3  # they are used
    # What was used latest is there.
    assert used.num_bytes > 0


@pytest.mark.filterwarnings("ignore")
def test_ended_engine_is_forgotten() -> None:
    ended: Any = Cache()
    other: Any = Cache()
    caches = GrammarCaches(1)
    ended.compile(0)
    caches.used(other)
    caches.forget(ended)
    caches.forget(ended)
    size = ended.num_bytes
    caches.used(other)
    assert ended.num_bytes == size > 0


def request(backend: str, **structured: Any) -> Request:
    params = StructuredOutputsParams(**structured)
    params._backend = backend
    asked = EngineCoreRequest(
        request_id=backend,
        prompt_token_ids=[1],
        mm_features=None,
        sampling_params=SamplingParams(structured_outputs=params),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    return Request.from_engine_core_request(asked, None)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> GrammarCaches:
    """Of the process, with no limit that matters."""
    caches = GrammarCaches(1 << 30)
    monkeypatch.setattr("gpupoold.worker.engine.grammars._caches", caches)
    return caches


@pytest.fixture
def grammars(tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> EngineGrammars:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_XGRAMMAR_CACHE_MB", "4096")
    arguments = EngineArgs(model=str(tiny_models["tiny-llama"]), enforce_eager=True)
    return EngineGrammars(arguments.create_engine_config(), "m")


def compiled(grammars: EngineGrammars, one: Request) -> Any:
    grammars.grammar_init(one)
    return compiled_again(one)


def wait_until_ended() -> None:
    """Return when the backends that were cleared are gone."""
    for one in threading.enumerate():
        if one.name == "grammars-end":
            one.join(60)
            assert not one.is_alive()


@pytest.mark.filterwarnings("ignore")
def test_an_engine_that_ends_does_not_wait_for_its_grammars(
    caches: GrammarCaches, grammars: EngineGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other engines step in the thread that ends this one."""
    compiled(grammars, request("xgrammar", regex="a"))
    manager = grammars._by_backend["xgrammar"]
    backend = manager.backend
    may_compile, is_compiling = threading.Event(), threading.Event()
    destroyed: list[bool] = []
    compile_grammar, destroy = backend.compile_grammar, backend.destroy

    def wait_and_compile(*arguments: Any, **options: Any) -> Any:
        is_compiling.set()
        may_compile.wait(60)
        return compile_grammar(*arguments, **options)

    def note_and_destroy() -> None:
        destroyed.append(late.structured_output_request.is_grammar_ready)
        destroy()

    monkeypatch.setattr(backend, "compile_grammar", wait_and_compile)
    monkeypatch.setattr(backend, "destroy", note_and_destroy)
    late: Any = request("xgrammar", regex="b")
    grammars.grammar_init(late)
    assert is_compiling.wait(60)
    grammars.clear_backend()
    assert not destroyed, "what compiles still uses the backend"
    may_compile.set()
    wait_until_ended()
    assert destroyed == [True]
    assert manager not in caches._caches


@pytest.mark.filterwarnings("ignore")
def test_each_grammar_by_its_own_backend(caches: GrammarCaches, grammars: EngineGrammars) -> None:
    """In vLLM the first one's would compile all that follow."""
    schema = {"type": "integer", "multipleOf": 7}
    found = []
    for one in (
        request("xgrammar", regex="a"),
        request("guidance", json=schema),
        request("xgrammar", regex="b"),
    ):
        found.append(type(compiled(grammars, one).inner))
    assert found == [XgrammarGrammar, GuidanceGrammar, XgrammarGrammar]
    executor = grammars._by_backend["xgrammar"].executor
    niceness = executor.submit(os.getpriority, os.PRIO_PROCESS, 0).result(60)
    assert niceness > os.getpriority(os.PRIO_PROCESS, 0), "steps go before grammars"
    grammars.clear_backend()
    assert grammars.backend is None
    wait_until_ended()
    other: Any = Cache()
    caches.used(other)  # asks all engines' for their sizes


@pytest.mark.filterwarnings("ignore")
def test_a_costly_grammar_delays_no_other_backend(
    caches: GrammarCaches, grammars: EngineGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_compile = threading.Event()

    def make(name: str, *arguments: Any) -> Any:
        if name == "xgrammar":
            assert may_compile.wait(60)
        return make_backend(name, *arguments)

    monkeypatch.setattr(worker_grammars, "make_backend", make)
    costly = [request("xgrammar", regex="a") for _ in range(os.cpu_count() or 1)]
    for one in costly:
        grammars.grammar_init(one)
    assert isinstance(compiled(grammars, request("guidance", regex="b")).inner, GuidanceGrammar)
    may_compile.set()
    assert all(isinstance(compiled_again(one).inner, XgrammarGrammar) for one in costly)
    grammars.clear_backend()
    wait_until_ended()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_memory_of_compiled_grammars_is_given_back(
    grammars: EngineGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one compiler for all of them the process grows by 330 MB."""
    monkeypatch.setattr("gpupoold.worker.engine.grammars._caches", GrammarCaches(LIMIT_BYTES))
    process = psutil.Process()
    for number in range(300):
        if number == NUM_WARM_UP:
            before_bytes = process.memory_info().rss
        compiled(grammars, request("xgrammar", json=schema_of(number, 100)))
    assert process.memory_info().rss - before_bytes < MAX_GROWTH_BYTES
    grammars.clear_backend()


def resumed(tokens: list[int], **structured: Any) -> Any:
    """Return a request whose answer has these tokens."""
    one: Any = request("xgrammar", **structured)
    one.append_output_token_ids(tokens)
    one.num_preemptions = 1
    return one


def tokens_of(grammars: EngineGrammars, text: str) -> list[int]:
    return [grammars.tokenizer.convert_tokens_to_ids(one) for one in text]


@pytest.mark.filterwarnings("ignore")
def test_resumed_grammar_takes_the_tokens_beside_the_steps(grammars: EngineGrammars) -> None:
    """The next mask is the one after the tokens."""
    whole = request("xgrammar", regex="abcd*")
    plain = compiled(grammars, whole)
    tokens = tokens_of(grammars, "abc")
    assert plain.accept_tokens("", tokens)
    one = resumed(tokens, regex="abcd*")
    compiled(grammars, one)
    assert not grammars.take_up(one)
    assert compiled_again(one).has_taken_up
    assert grammars.take_up(one)
    wanted = grammars.grammar_bitmask({"a": whole}, ["a"], {}).copy()
    assert (grammars.grammar_bitmask({"a": one}, ["a"], {}) == wanted).all()
    assert grammars.take_refused() == {}
    grammars.clear_backend()


@pytest.mark.filterwarnings("ignore")
def test_grammar_that_its_answer_does_not_match(grammars: EngineGrammars) -> None:
    one = resumed(tokens_of(grammars, "ax"), regex="abcd*")
    compiled(grammars, one)
    assert not grammars.take_up(one)
    assert isinstance(compiled_again(one), GrammarOverBound)
    [(request_id, refusal)] = grammars.take_refused().items()
    assert request_id == one.request_id
    assert "stopped at a token" in refusal.reason
    grammars.clear_backend()


@pytest.mark.filterwarnings("ignore")
def test_equal_grammars_of_an_owner_are_refused_together(
    grammars: EngineGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And later ones are not compiled; the same grammar of another owner is."""
    monkeypatch.setattr(bounded_grammars, "MAX_CALL_S", 0.02)
    rules = 'root ::= x\nx ::= " " x " " | " " | x x'
    asked: dict[str, Any] = {}
    for name, salt in (("a", "key:"), ("b", "key:own"), ("c", "other:")):
        asked[name] = request("xgrammar", grammar=rules)
        asked[name].request_id, asked[name].cache_salt = name, salt
        compiled(grammars, asked[name])
    ids, refused = ["a", "b"], dict[str, Any]()
    for _ in range(400):
        grammars.grammar_bitmask(asked, ids, {})
        refused |= grammars.take_refused()
        if refused:
            break
        for name in ids:
            asked[name].structured_output_request.grammar.accept_tokens(
                "", tokens_of(grammars, " ")
            )
    assert set(refused) >= {"a"}
    grammars.grammar_bitmask(asked, ids, {})
    assert {*refused, *grammars.take_refused()} == {"a", "b"}
    assert not asked["c"].structured_output_request.grammar.refusal
    again = request("xgrammar", grammar=rules)
    again.request_id, again.cache_salt = "d", "key:"
    assert isinstance(compiled(grammars, again), GrammarOverBound)
    assert set(grammars.take_refused()) == {"d"}
    grammars.clear_backend()


@pytest.mark.filterwarnings("ignore")
def test_equal_grammars_that_met_a_costly_one_leave_one_thread(grammars: EngineGrammars) -> None:
    """The samples of a request would otherwise take the threads for grammars of all."""
    asked = {name: request("xgrammar", regex="ab?c") for name in "abc"}
    asked["c"].cache_salt = "other:"
    found: Any = {name: compiled(grammars, one) for name, one in asked.items()}
    found["a"].refuse(0.03, 0.01)
    grammars._refuse_equal(asked.values())
    assert found["b"].refusal == found["a"].refusal
    assert "repeat the request" in found["b"].refusal
    assert not found["b"].is_final
    assert not found["c"].refusal
    grammars.clear_backend()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        (["key"], set()),
        (["key", "key"], {"a"}),
        (["", ""], set()),
        (["1", "1", "2", "2", "3", "3", "4", "4"], {"a", "b", "c"}),
    ],
)
def test_costly_grammars_of_a_key_hinder_that_key_first(
    keys: list[str], refused: set[str], grammars: EngineGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whoever is hindered may try again."""
    monkeypatch.setattr(worker_grammars._calls, "abandoned_keys", lambda: keys)
    for name, salt in (("a", "key:"), ("b", "other:"), ("c", "")):
        asked = request("xgrammar", regex="ab?c")
        asked.request_id, asked.cache_salt = name, salt
        compiled(grammars, asked)
    found = grammars.take_refused()
    assert set(found) == refused
    assert not any(one.is_final for one in found.values())
    assert all("try again later" in one.reason for one in found.values())
    grammars.clear_backend()


def compiled_again(one: Request) -> Any:
    structured = one.structured_output_request
    assert structured is not None
    deadline_s = time.monotonic() + 60
    while not structured.is_grammar_ready:
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    return structured.grammar
