"""Grammars in a worker: each by its own backend, and one limit for what all engines cache."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from gpupoold.instance.grammars import EngineGrammars, GrammarCaches

LIMIT_BYTES = 300_000


def compiler() -> xgrammar.GrammarCompiler:
    vocabulary = [*map(chr, range(32, 127)), "</s>"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[len(vocabulary) - 1])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=LIMIT_BYTES)


def compile_one(compiler: xgrammar.GrammarCompiler, number: int) -> None:
    properties = {f"p{number}_{index}": {"type": "string"} for index in range(10)}
    compiler.compile_json_schema(json.dumps({"type": "object", "properties": properties}))


@pytest.mark.filterwarnings("ignore")
def test_all_caches_together_are_bounded() -> None:
    compilers = [compiler() for _ in range(4)]
    caches = GrammarCaches(LIMIT_BYTES)
    totals = []
    for number in range(60):
        used = compilers[number % 4]
        compile_one(used, number)
        caches.used(used)
        totals.append(sum(one.get_cache_size_bytes() for one in compilers))
    assert max(totals) <= LIMIT_BYTES
    assert max(totals) > LIMIT_BYTES / 3  # they are used
    # What was used latest is there.
    assert used.get_cache_size_bytes() > 0


@pytest.mark.filterwarnings("ignore")
def test_ended_engine_is_forgotten() -> None:
    ended, other = compiler(), compiler()
    caches = GrammarCaches(1)
    compile_one(ended, 0)
    caches.used(other)
    caches.forget(ended)
    caches.forget(ended)
    size = ended.get_cache_size_bytes()
    caches.used(other)
    assert ended.get_cache_size_bytes() == size > 0


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


@pytest.mark.filterwarnings("ignore")
def test_each_grammar_by_its_own_backend(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In vLLM the first one's would compile all that follow."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    arguments = EngineArgs(model=str(tiny_models["tiny-llama"]), enforce_eager=True)
    grammars = EngineGrammars(arguments.create_engine_config(), "m")
    schema = {"type": "integer", "multipleOf": 7}
    found = []
    for one in (
        request("xgrammar", regex="a"),
        request("guidance", json=schema),
        request("xgrammar", regex="b"),
    ):
        grammars.grammar_init(one)
        structured = one.structured_output_request
        assert structured is not None
        deadline_s = time.monotonic() + 60
        while not structured.is_grammar_ready:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        found.append(type(structured.grammar))
    assert found == [XgrammarGrammar, GuidanceGrammar, XgrammarGrammar]
    compiling = grammars._by_backend["xgrammar"].executor
    niceness = compiling.submit(os.getpriority, os.PRIO_PROCESS, 0).result(60)
    assert niceness > os.getpriority(os.PRIO_PROCESS, 0), "steps go before grammars"
    grammars.clear_backend()
    assert grammars.backend is None
