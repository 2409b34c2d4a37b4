"""Rules of a grammar that derive themselves twice in a row.

If a rule ``s`` derives ``s s``, a text of n parts matches in exponentially many ways, and an Earley
parser such as xgrammar's takes time in the square of n and more for each character. Such a rule
never adds a text that a repetition could not express.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import networkx  # type: ignore[import-untyped]

# Kinds of expressions in xgrammar's serialised grammars (``GrammarExprType``).
_EMPTY, _RULE, _SEQUENCE, _CHOICES, _TAG_DISPATCH, _REPEAT = 3, 4, 5, 6, 7, 8
_STAR = 2
_MAX_REPEATED = 2


Expressions = Callable[[int], tuple[int, list[int]]]


@dataclass(slots=True)
class GrammarRule:
    """A rule by its alternatives; each element is the number of a rule, or None for characters."""

    name: str
    alternatives: list[list[int | None]] = field(default_factory=list)


def doubled_rule(serialised: str) -> str | None:
    """Return the name of a rule that derives itself twice in a row, or None.

    ``serialised`` is the JSON of an uncompiled ``xgrammar.Grammar``.
    """
    rules = _rules_of(json.loads(serialised))
    nullable = _nullable(rules)
    begins = _cycles(_edges(rules, nullable, backwards=False))
    ends = _cycles(_edges(rules, nullable, backwards=True))
    for number, rule in enumerate(rules):
        if number not in begins or number not in ends:
            continue
        for left, right in _neighbours(rule, nullable):
            if begins.get(left) == begins[number] and ends.get(right) == ends[number]:
                return rule.name
    return None


def _rules_of(grammar: dict[str, Any]) -> list[GrammarRule]:
    """Return the rules of a serialised grammar; repetitions become rules of their own."""
    data, starts = grammar["grammar_expr_data"], grammar["grammar_expr_indptr"]

    def expression(number: int) -> tuple[int, list[int]]:
        at = starts[number]
        return data[at], data[at + 2 : at + 2 + data[at + 1]]

    rules = [GrammarRule(name) for name, *_ in grammar["rules"]]
    for rule, (_, body, *_) in zip(list(rules), grammar["rules"], strict=True):
        kind, parts = expression(body)
        for part in parts if kind == _CHOICES else [body]:
            rule.alternatives += _alternative(part, expression, rules)
    return rules


def _alternative(
    number: int, expression: Expressions, rules: list[GrammarRule]
) -> list[list[int | None]]:
    kind, parts = expression(number)
    if kind == _EMPTY:
        return [[]]
    if kind == _SEQUENCE:
        return [[one for part in parts for one in _element(*expression(part), rules)]]
    return [list(_element(kind, parts, rules))]


def _element(kind: int, parts: list[int], rules: list[GrammarRule]) -> Iterator[int | None]:
    if kind == _RULE:
        yield parts[0]
    elif kind == _REPEAT:
        repeated, least, most = parts
        yield from [repeated] * min(least, _MAX_REPEATED)
        if most < 0 or most > least:  # at most as often again
            rules.append(GrammarRule("", [[], [repeated, len(rules)]]))
            yield len(rules) - 1
    elif kind == _STAR:
        rules.append(GrammarRule("", [[], [None]]))
        yield len(rules) - 1
    elif kind != _EMPTY:
        yield None


def _nullable(rules: list[GrammarRule]) -> set[int]:
    """Return the rules that match the empty text."""
    found = set[int]()
    while True:
        more = {
            number
            for number, rule in enumerate(rules)
            if number not in found
            and any(all(one in found for one in every) for every in rule.alternatives)
        }
        if not more:
            return found
        found |= more


def _edges(rules: list[GrammarRule], nullable: set[int], *, backwards: bool) -> list[set[int]]:
    """Return for each rule the rules with which its texts may begin, or end."""
    found = []
    for rule in rules:
        edge = set[int]()
        for alternative in rule.alternatives:
            for one in reversed(alternative) if backwards else alternative:
                if one is None:
                    break
                edge.add(one)
                if one not in nullable:
                    break
        found.append(edge)
    return found


def _neighbours(rule: GrammarRule, nullable: set[int]) -> Iterable[tuple[int, int]]:
    """Yield pairs of rules that may be all that the rule derives, one after the other."""
    for alternative in rule.alternatives:
        needed = [at for at, one in enumerate(alternative) if one not in nullable]
        if len(needed) > 2:
            continue
        for at, left in enumerate(alternative):
            for then in range(at + 1, len(alternative)):
                right = alternative[then]
                if set(needed) <= {at, then} and left is not None and right is not None:
                    yield left, right


def _cycles(edges: list[set[int]]) -> dict[int, int]:
    """Return the rules that lead back to themselves; rules of one cycle have the same value."""
    graph = networkx.DiGraph([(one, other) for one, others in enumerate(edges) for other in others])
    return {
        number: index
        for index, component in enumerate(networkx.strongly_connected_components(graph))
        for number in component
        if len(component) > 1 or number in edges[number]
    }
