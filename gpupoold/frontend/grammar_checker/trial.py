"""Trial compilation of a grammar as in a worker, in a process that may die."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import networkx  # type: ignore[import-untyped]
import numpy
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers.registry import cached_get_tokenizer, cached_tokenizer_from_config
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.request import get_structured_output_key
from vllm.v1.structured_output.utils import grammar_is_likely_lark
from xgrammar import Grammar

from gpupoold.equal_tokenizers import share_tokenizers
from gpupoold.frontend.adapter import engine_config
from gpupoold.frontend.grammars import GrammarCheck, GrammarVerdict
from gpupoold.grammar_backends import make_backend
from gpupoold.system.process import LONG_GRAMMAR_NICENESS, limit_use, lower_priority_of

MAX_CPU_S = 3
ORDINARY_S = 0.1
"""Limit of CPU time for an ordinary grammar, in seconds."""
MAX_MEMORY_BYTES = 1 << 30
"""Limit of address space beyond the process's present size, in bytes."""
_STACK_BYTES = 4 << 20  # half of what a worker's threads have
_MAX_REASON_CHARS = 500

MAX_STEP_S = 0.05
"""Limit of CPU time for a mask or a token, in seconds; a worker has the same limit."""
MAX_CHARS = 2_000
"""Bytes of text of a walk."""
MAX_WALKS_S = 0.5
"""CPU time of all walks, in seconds."""
_NUM_TOKENS = 24

Lengths = numpy.ndarray[Any, numpy.dtype[numpy.int32]]
Choice = Callable[[Lengths, Lengths], int]
"""Chooses one of the permitted tokens, which have the given lengths."""

# Kinds of expressions in xgrammar's serialised grammars (``GrammarExprType``).
_EMPTY, _RULE, _SEQUENCE, _CHOICES, _TAG_DISPATCH, _REPEAT = 3, 4, 5, 6, 7, 8
_STAR = 2
_MAX_REPEATED = 2


Expressions = Callable[[int], tuple[int, list[int]]]


class Prepared:
    """Shared parts of one model's checks: configuration, tokenizer, xgrammar's compiler."""

    def __init__(self, check: GrammarCheck) -> None:
        share_tokenizers()
        self.config: VllmConfig = engine_config(check.model, check.loaded)
        self.tokenizer: Any = cached_tokenizer_from_config(self.config.model_config)
        cached_get_tokenizer.cache_clear()  # the cache would keep tokenizers of all models
        self._xgrammar = make_backend("xgrammar", self.config, self.tokenizer)
        compiled = self._xgrammar.compiler.compile_grammar('root ::= "a"')
        tokens = compiled.tokenizer_info.decoded_vocab
        self.token_lengths: Lengths = numpy.fromiter(map(len, tokens), numpy.int32, len(tokens))
        """Bytes of each token of the vocabulary by id."""

    def backend(self, name: str) -> Any:
        """vLLM's backend of this name, as a worker has one."""
        if name == "xgrammar":
            return self._xgrammar
        return make_backend(name, self.config, self.tokenizer)


def try_grammar(prepared: Prepared, check: GrammarCheck) -> GrammarVerdict:
    """Validate and compile the grammar, and take some tokens; may end the process.

    Ordinary grammars take a few milliseconds. A slow one gets the lowest priority.
    """
    limit_use(MAX_CPU_S, MAX_MEMORY_BYTES)
    verdicts: list[GrammarVerdict] = []
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=lambda: verdicts.append(_verdict(prepared, check)))
    thread.start()
    thread.join(ORDINARY_S)
    while thread.is_alive():
        if time.process_time() > ORDINARY_S:
            lower_priority_of(os.getpid(), LONG_GRAMMAR_NICENESS)
        thread.join(ORDINARY_S)
    return verdicts[0]


def _verdict(prepared: Prepared, check: GrammarCheck) -> GrammarVerdict:
    try:
        backend = _compile(prepared, json.loads(check.constraint))
    except MemoryError:
        reason = f"its compilation takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
    except Exception as error:
        reason = "; ".join(str(cause) or repr(cause) for cause in (error, error.__cause__) if cause)
        if "bad_alloc" in reason:
            reason = f"its compilation takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
    else:
        return GrammarVerdict(check.check_id, "accepted", backend)
    return GrammarVerdict(check.check_id, "refused", reason=reason[:_MAX_REASON_CHARS])


def _compile(prepared: Prepared, parts: dict[str, Any]) -> str:
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(**parts))
    config = prepared.config
    sampling._validate_structured_outputs(
        config.model_config, config.structured_outputs_config, prepared.tokenizer
    )
    structured = sampling.structured_outputs
    assert structured is not None and structured._backend is not None
    if structured._backend == "xgrammar":
        _refuse_doubled_rules(structured)
    backend = prepared.backend(structured._backend)
    key = get_structured_output_key(structured)
    walk(lambda: backend.compile_grammar(*key), prepared.token_lengths)
    return structured._backend


def _refuse_doubled_rules(structured: StructuredOutputsParams) -> None:
    """Check the kinds of grammars whose rules a client may write."""
    text = structured.grammar
    if text is not None:
        is_lark = grammar_is_likely_lark(text)
        grammar = Grammar.from_lark(text) if is_lark else Grammar.from_ebnf(text)
    elif structured.structural_tag is not None and "structures" not in json.loads(
        structured.structural_tag
    ):
        grammar = Grammar.from_structural_tag(structured.structural_tag)
    else:
        return
    rule = doubled_rule(grammar.serialize_json())
    if rule is not None:
        raise ValueError(
            f"the rule `{rule}` derives itself twice in a row, so that a text matches in very many "
            "ways; write a repetition such as `(item)+` instead"
        )


def walk(make: Callable[[], StructuredOutputGrammar], lengths: Lengths) -> None:
    """Take tokens of several texts; ``lengths`` has the bytes of each token by id.

    The cost of a token depends on the tokens before. So several walks take a text of the length of
    an answer: forced text at once, and then tokens that make the most of the grammar, the longest.
    Raises ValueError: no token is permitted, or a step takes too long for streams of the same
    batch.
    """
    draw = random.Random(0)
    deadline_s = time.thread_time() + MAX_WALKS_S

    def any_token(allowed: Lengths, _: Lengths) -> int:
        return int(draw.choice(allowed))

    def longest(allowed: Lengths, sizes: Lengths) -> int:
        return int(allowed[int(sizes.argmax())])

    def one_of_the_long(allowed: Lengths, sizes: Lengths) -> int:
        return int(draw.choice(allowed[sizes * 2 >= sizes.max()]))

    _Walk(make(), lengths, deadline_s).take(any_token, _NUM_TOKENS, MAX_CHARS)
    for choice in (longest, one_of_the_long, any_token):
        walking = _Walk(make(), lengths, deadline_s)
        walking.take_forced(MAX_CHARS)
        walking.take(choice, MAX_CHARS, MAX_CHARS)


class _Walk:
    def __init__(
        self, grammar: StructuredOutputGrammar, lengths: Lengths, deadline_s: float
    ) -> None:
        self._grammar = grammar
        self._lengths = lengths
        self._deadline_s = deadline_s
        num_words = -(-len(lengths) // 32)
        self._bitmask = torch.full((1, num_words), -1, dtype=torch.int32)

    def take_forced(self, max_chars: int) -> None:
        """Take the text that the grammar begins with in any case."""
        matcher = getattr(self._grammar, "matcher", None)
        if matcher is not None:  # xgrammar
            text = matcher.find_jump_forward_string().encode("utf-8", "surrogatepass")
            matcher.accept_string(text[:max_chars])

    def take(self, choose: Choice, max_tokens: int, max_chars: int) -> None:
        """Take permitted tokens until the end of the text, or a limit."""
        num_chars = 0
        for index in range(max_tokens):
            is_late = time.thread_time() > self._deadline_s
            if self._grammar.is_terminated() or num_chars > max_chars or is_late:
                return
            self._timed(self._grammar.fill_bitmask, self._bitmask, 0)
            bits = numpy.unpackbits(self._bitmask.numpy().view(numpy.uint8), bitorder="little")
            allowed = bits[: len(self._lengths)].nonzero()[0].astype(numpy.int32)
            if not len(allowed):
                if not index:
                    raise ValueError("no answer matches the grammar")
                return
            token = choose(allowed, self._lengths[allowed])
            num_chars += int(self._lengths[token])
            if not self._timed(self._grammar.accept_tokens, "", [token]):
                return

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        started_s = time.thread_time()
        result = call(*arguments)
        taken_s = time.thread_time() - started_s
        if taken_s > MAX_STEP_S:
            raise ValueError(
                f"a token takes {taken_s * 1000:.0f} ms; the bound is {MAX_STEP_S * 1000:.0f}"
            )
        return result


@dataclass(slots=True)
class GrammarRule:
    """A rule by its alternatives; each element is the number of a rule, or None for characters.

    If a rule ``s`` derives ``s s``, a text of n parts matches in exponentially many ways, and an
    Earley parser such as xgrammar's takes time in the square of n and more for each character. Such
    a rule never adds a text that a repetition could not express.
    """

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
        return [[symbol for part in parts for symbol in _element(*expression(part), rules)]]
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
    found = set[int]()
    while True:
        more = {
            number
            for number, rule in enumerate(rules)
            if number not in found
            and any(all(symbol in found for symbol in every) for every in rule.alternatives)
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
        needed = [at for at, symbol in enumerate(alternative) if symbol not in nullable]
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
