"""Walks through grammars that are cheap at first, with xgrammar's real matcher."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy
import pytest
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar
from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher, TokenizerInfo

from gpupoold.frontend.grammar_checker.trial import walk

VOCABULARY = [
    *map(chr, range(32, 127)),
    *(" " * number for number in range(2, 40)),
    *("a" * number for number in range(2, 40)),
    "</s>",
]
LENGTHS = numpy.array([len(one) for one in VOCABULARY], numpy.int32)
COMPILER = GrammarCompiler(
    TokenizerInfo(VOCABULARY, stop_token_ids=[len(VOCABULARY) - 1]), max_threads=1
)
LITERAL = "the quick brown fox jumps over the lazy dog " * 2


def take(compiled: CompiledGrammar) -> int:
    """Walk; return the number of walks."""
    made: list[XgrammarGrammar] = []

    def make() -> XgrammarGrammar:
        made.append(XgrammarGrammar(len(VOCABULARY), GrammarMatcher(compiled), compiled))
        return made[-1]

    walk(make, LENGTHS)
    return len(made)


@pytest.mark.parametrize(
    "rules",
    [
        's ::= " " s " " | " " | s s',
        's ::= " " s " " s " " s " " s | ""',
        's ::= x{1,1000}\nx ::= y{1,1000}\ny ::= " " | "  "',
    ],
)
def test_cost_behind_forced_text_is_found(rules: str) -> None:
    with pytest.raises(ValueError, match=r"a token takes .* ms; the bound is 50"):
        take(COMPILER.compile_grammar(f'root ::= "{LITERAL}" s\n{rules}'))


@pytest.mark.parametrize(
    "compile_it",
    [
        lambda: COMPILER.compile_grammar('root ::= [a-z ]* "." root | ""'),
        lambda: COMPILER.compile_grammar(f'root ::= "{LITERAL * 60}"'),
        lambda: COMPILER.compile_regex(r"([a-z]+ )*[0-9]{3}"),
        lambda: COMPILER.compile_json_schema(json.dumps({"type": "array"})),
    ],
)
def test_ordinary_grammars_pass_all_walks(compile_it: Callable[[], CompiledGrammar]) -> None:
    assert take(compile_it()) == 4


def test_no_text_matches() -> None:
    with pytest.raises(ValueError, match="no answer matches"):
        take(COMPILER.compile_grammar('root ::= "\u00e9" root'))
