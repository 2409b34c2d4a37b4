"""Verdicts on grammars by vLLM's real validation and compilers, without the child process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpupoold.frontend.grammar_checker import trial
from gpupoold.frontend.grammars import GrammarCheck
from tests.unit.frontend.test_grammar_vetting import LOADED, MODEL

pytestmark = pytest.mark.filterwarnings("ignore")

LITERAL = "the quick brown fox jumps over the lazy dog " * 2
DOUBLED = "the rule `x` derives itself twice in a row"
CONTENT = {"type": "grammar", "grammar": 'root ::= x\nx ::= x x | "a"'}
TAG = {"type": "tag", "begin": "<f>", "content": CONTENT, "end": "</f>"}
LARGE = {"type": "object", "properties": {f"p{one}": {"type": "string"} for one in range(50)}}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "long-literal": ({"grammar": f'root ::= "{LITERAL}" x\nx ::= " " x " " | " " | x x'}, DOUBLED),
    "lark": ({"grammar": 'start: x\nx: x x | "a"'}, DOUBLED),
    "tag": ({"structural_tag": json.dumps({"type": "structural_tag", "format": TAG})}, "derives"),
}
ACCEPTED: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"json": LARGE}, "xgrammar"),
    "multiples": ({"json": {"type": "integer", "multipleOf": 7}}, "guidance"),
    "choice": ({"choice": ["a", "b"]}, "xgrammar"),
    "pattern": ({"regex": r"(\w+ )*[0-9]{3}"}, "xgrammar"),
    "sum": ({"grammar": 'root ::= s\ns ::= s "+" s | [0-9]+'}, "xgrammar"),
}


@pytest.fixture(scope="module")
def prepared(tiny_models: dict[str, Path]) -> trial.Prepared:
    model = dataclasses.replace(MODEL, path=str(tiny_models["tiny-llama"]))
    loaded = msgspec.structs.replace(LOADED, max_model_len=512, architecture="LlamaForCausalLM")
    return trial.Prepared(GrammarCheck(1, 1, model, loaded, b""))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(prepared: trial.Prepared, name: str) -> None:
    structured, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        trial._compile(prepared, structured)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(prepared: trial.Prepared, name: str) -> None:
    structured, backend = ACCEPTED[name]
    assert trial._compile(prepared, structured) == backend
