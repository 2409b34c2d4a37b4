"""Grammars with bounded calls: the same masks, and an end for one grammar only."""

from __future__ import annotations

import json
import random
import threading

import pytest
import torch
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar
from xgrammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarMatcher,
    TokenizerInfo,
    allocate_token_bitmask,
)

from gpupoold.worker.engine import bounded_grammars
from gpupoold.worker.engine.bounded_grammars import (
    BoundedGrammar,
    GrammarCalls,
    GrammarOverBound,
    put_off,
)

VOCABULARY = [*map(chr, range(32, 127)), " " * 40, "aa", "aaaa", "</s>"]
SPACES = VOCABULARY.index(" " * 40)
COMPILER = GrammarCompiler(
    TokenizerInfo(VOCABULARY, stop_token_ids=[len(VOCABULARY) - 1]), max_threads=1
)
SCHEMA = COMPILER.compile_json_schema(
    json.dumps({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
)
# 40 spaces take some milliseconds, 80 some ten, 120 some hundred, 160 seconds.
COSTLY = COMPILER.compile_grammar('root ::= x\nx ::= " " x " " | " " | x x')


def bounded(compiled: CompiledGrammar, owner: bytes = b"") -> BoundedGrammar:
    return BoundedGrammar(
        XgrammarGrammar(len(VOCABULARY), GrammarMatcher(compiled), compiled), owner
    )


def fill(grammars: list[BoundedGrammar], masks: torch.Tensor) -> torch.Tensor:
    for index, one in enumerate(grammars):
        if one.is_terminated():
            masks[index].fill_(-1)
        else:
            one.fill_bitmask(masks, index)
    return masks


def allowed(mask: torch.Tensor) -> list[int]:
    return [i for i in range(len(VOCABULARY)) if int(mask[i // 32]) >> i % 32 & 1]


def test_masks_are_the_grammars_own() -> None:
    """Tokens are taken late, drafts are taken back, and every mask is the one without bounds."""
    calls, draw = GrammarCalls(), random.Random(1)
    for _ in range(5):
        ours, plain = bounded(SCHEMA), bounded(SCHEMA).inner
        for _ in range(60):
            masks = calls.run(lambda one=ours: fill([one], allocate_token_bitmask(1, 99)))  # type: ignore[misc]
            wanted = allocate_token_bitmask(1, 99)
            if plain.is_terminated():
                break
            plain.fill_bitmask(wanted, 0)
            assert torch.equal(masks, wanted)
            token = draw.choice(allowed(masks[0]))

            def draft(one: BoundedGrammar = ours, taken: int = token) -> list[int]:
                permitted = one.validate_tokens([taken, SPACES])
                assert one.accept_tokens("", [taken])
                one.rollback(1)
                return permitted

            assert calls.run(draft) == plain.validate_tokens([token, SPACES])
            assert ours.accept_tokens("", [token])
            assert plain.accept_tokens("", [token])
    assert not ours.refusal
    assert calls.abandoned_keys() == []


def test_long_call_ends_its_grammar_alone() -> None:
    calls, renewed = GrammarCalls(), list[int]()
    costly, honest = bounded(COSTLY), bounded(SCHEMA)
    costly.key = "key"
    held = list[torch.Tensor]()

    def work() -> torch.Tensor:
        held.append(allocate_token_bitmask(3, len(VOCABULARY)))
        return fill([honest, costly, honest], held[-1])

    while not costly.refusal:
        assert costly.accept_tokens("", [SPACES])
        masks = calls.run(work, lambda: renewed.append(1))
    assert "more than 50 ms of CPU time for one token" in costly.refusal
    assert costly.is_slow_call
    assert allowed(masks[1]) == list(range(len(VOCABULARY)))
    assert torch.equal(masks[0], masks[2])
    assert not honest.refusal
    assert masks is held[-1]
    assert not costly.accept_tokens("", [SPACES])
    assert [thread.abandoned_key for thread in calls._abandoned] == ["key"]
    # The thread of the long call ends by itself, and the next calls have another.
    assert torch.equal(calls.run(work)[0], masks[0])
    for thread in threading.enumerate():
        if thread in calls._abandoned:
            thread.join(120)
    assert calls.abandoned_keys() == []


def test_many_long_calls_of_a_step_take_little_more_than_one() -> None:
    """The bound is 50 ms, then ever less: 50 grammars took 2.5 s before."""
    calls = GrammarCalls()
    costly = [bounded(COSTLY, bytes([number])) for number in range(8)]
    for one in costly:
        assert one.accept_tokens("", [SPACES] * 4)
    masks = calls.run(
        lambda: fill([bounded(SCHEMA), *costly], allocate_token_bitmask(9, len(VOCABULARY)))
    )
    assert allowed(masks[0]) != list(range(len(VOCABULARY)))
    limits = [int(one.refusal.partition(" ms")[0].rpartition(" ")[2]) for one in costly]
    assert limits[0] == 50
    assert limits == sorted(limits, reverse=True)
    assert limits[1] <= 13
    assert limits[-1] <= 6
    assert [one.is_final for one in costly] == [True] + 7 * [False]
    assert "repeat the request" in costly[1].refusal
    for thread in calls._abandoned:
        thread.join(120)


def test_costly_grammars_take_turns() -> None:
    """All fit into some step, those together in one whose calls take up to 50 ms."""
    grammars = {name: bounded(SCHEMA) for name in "abcde"}
    for name, used_s in zip("abcde", (0.03, 0.00015, 0.04, 0.01, 0.05), strict=True):
        grammars[name].since_s = used_s
    out = [put_off(grammars, turn) for turn in range(1, 6)]
    assert [sorted(one) for one in out] == [
        ["c", "e"],  # a and d, 40 ms
        ["a", "e"],  # c and d, 50 ms
        ["a", "c", "d"],
        ["c", "e"],
        ["a", "e"],
    ]
    assert put_off({"b": grammars["b"]}, 6) == set()


def test_first_mask_is_made_before_the_first_step() -> None:
    calls, one, wanted = GrammarCalls(), bounded(SCHEMA), allocate_token_bitmask(1, 99)
    one.inner.fill_bitmask(wanted, 0)
    made, inner = list[int](), one.inner

    class Counting(XgrammarGrammar):
        def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
            made.append(batch_index)
            inner.fill_bitmask(bitmask, batch_index)

    one.inner = Counting(inner.vocab_size, inner.matcher, inner.ctx)  # type: ignore[attr-defined]
    one.prepare(torch.empty_like(wanted))
    for _ in range(2):
        masks = allocate_token_bitmask(2, 99)
        assert torch.equal(calls.run(lambda into=masks: fill([one, one], into))[1:], wanted)  # type: ignore[misc]
    assert made == [0]
    assert one.accept_tokens("", [VOCABULARY.index("{")])
    masks = calls.run(lambda: fill([one], allocate_token_bitmask(1, 99)))
    inner.fill_bitmask(wanted, 0)
    assert torch.equal(masks, wanted)
    assert made == [0, 0]


def test_sum_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_grammars, "MAX_TOTAL_S", 0.0)
    monkeypatch.setattr(bounded_grammars, "PER_TOKEN_S", 0.0)
    one, masks = bounded(SCHEMA), allocate_token_bitmask(1, len(VOCABULARY))
    GrammarCalls().run(lambda: fill([one], masks))
    assert "the bound is 0 s and 0 ms per token" in one.refusal
    assert not one.is_slow_call
    with pytest.raises(GrammarOverBound, match="the bound is"):
        one.take_all()


def test_error_of_work_is_raised() -> None:
    calls = GrammarCalls()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            calls.run(lambda: 1 // 0)
    assert calls.run(lambda: 7) == 7


def test_token_that_does_not_match() -> None:
    one = bounded(SCHEMA)
    assert one.accept_tokens("", [SPACES])  # noted
    with pytest.raises(GrammarOverBound, match="stopped at a token: the token is not permitted"):
        one.take_all()
    assert not one.accept_tokens("", [0])
