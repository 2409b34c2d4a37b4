"""Rules that derive themselves twice in a row, by xgrammar's own reading of each kind of text."""

from __future__ import annotations

import json

import pytest
from xgrammar import Grammar

from gpupoold.frontend.grammar_checker.trial import doubled_rule

DOUBLED = {
    's ::= s s | "a"': "s",
    's ::= " " s " " | " " | s s': "s",
    's ::= s ws s | "a"\nws ::= [ ]*': "s",
    's ::= t | "a"\nt ::= s s': "t",
    's ::= first last | "x"\nfirst ::= s "y"?\nlast ::= " "* s': "s",
    's ::= s{2,3} | "a"': "s",
    's ::= s+ | "a"': "s_1",
    's ::= (s)* "a" | "b"': "root",
    's ::= n s n s n | "a"\nn ::= ""': "s",
}
FINE = [
    's ::= s "+" s | "1"',
    's ::= "+" s s | "1"',
    's ::= "(" s* ")" | "a"',
    's ::= (" "* " "*)*',
    's ::= "a" s "b" s | ""',
    's ::= item*\nitem ::= "{" s "}" | "x;"',
    's ::= s "a" | "a"',
    's ::= "a" s | "a"',
    's ::= s x | x\nx ::= "(" s ")" | "y"',
    's ::= [^"]* "\\"" s{0,9} | "a"{3,}',
]


@pytest.mark.parametrize("rules", DOUBLED)
def test_doubled(rules: str) -> None:
    found = doubled_rule(Grammar.from_ebnf(f"root ::= s\n{rules}").serialize_json())
    assert found is not None
    assert found.startswith(DOUBLED[rules]) or DOUBLED[rules] == "root"


@pytest.mark.parametrize("rules", FINE)
def test_fine(rules: str) -> None:
    assert doubled_rule(Grammar.from_ebnf(f"root ::= s\n{rules}").serialize_json()) is None


def test_other_kinds_of_text() -> None:
    assert doubled_rule(Grammar.from_lark('start: x\nx: x x | "a"').serialize_json()) == "x"
    content = {"type": "grammar", "grammar": 'root ::= root root | "a"'}
    tag = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    structural = {"type": "structural_tag", "format": tag}
    found = doubled_rule(Grammar.from_structural_tag(json.dumps(structural)).serialize_json())
    assert found is not None
    assert found.startswith("root")
    tree = {"type": "array", "items": {"$ref": "#"}, "minItems": 2}
    text = json.dumps({"anyOf": [tree, {"type": "string", "pattern": "(a+)+"}]})
    assert doubled_rule(Grammar.from_json_schema(text).serialize_json()) is None
    assert doubled_rule(Grammar.from_regex("((a|aa)+)+b").serialize_json()) is None
