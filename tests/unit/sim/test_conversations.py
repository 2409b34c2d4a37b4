"""Conversations in the simulator: how they are drawn, and what their kept KV saves."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest

from gpupoold.domain import Targets
from gpupoold.errors import UsageError
from gpupoold.sim.boxes import box_models, parse_box
from gpupoold.sim.device import BoxDevice
from gpupoold.sim.engine import SimOutcome, SimPrefixes, Simulation
from gpupoold.sim.lengths import parse_table
from gpupoold.sim.policies import PolicyOptions, make_policy
from gpupoold.sim.presets import Conversations
from gpupoold.sim.scenario import Draw
from gpupoold.sim.traces import trace_requests
from gpupoold.sim.workloads import SimRequest

TURN = SimRequest("r0", "m00", 0.0, 1000, 10, "c", 900)


def prefixes(budget_bytes: float = 1e9) -> SimPrefixes:
    return SimPrefixes({"m00": 10, "m01": 20}, lambda: budget_bytes)


class TestStore:
    def test_whole_blocks_of_the_history_are_found(self) -> None:
        store = prefixes()
        assert store.find(TURN) == 0
        store.keep(replace(TURN, prompt_tokens=800), 900)
        assert store.find(TURN) == 896
        assert store.find(replace(TURN, history_tokens=100)) == 96
        assert store.find(replace(TURN, conversation="d")) == 0
        assert store.find(replace(TURN, model="m01")) == 0
        assert store.num_hit_tokens == 896 + 96

    def test_the_last_token_is_computed(self) -> None:
        store = prefixes()
        store.keep(TURN, 2000)
        assert store.find(replace(TURN, prompt_tokens=896, history_tokens=896)) == 880

    def test_requests_without_a_conversation_keep_nothing(self) -> None:
        store = prefixes()
        store.keep(replace(TURN, conversation=""), 1000)
        assert store.used_bytes == 0
        assert store.find(replace(TURN, conversation="")) == 0

    def test_the_least_recently_used_goes_first(self) -> None:
        store = prefixes(budget_bytes=30_000)
        for name in "abc":
            store.keep(replace(TURN, conversation=name), 1000)
        assert store.find(replace(TURN, conversation="a"))
        store.keep(replace(TURN, conversation="d"), 1000)
        assert not store.find(replace(TURN, conversation="b"))
        assert store.find(replace(TURN, conversation="a"))
        assert store.used_bytes == 30_000
        store.keep(replace(TURN, model="m01", conversation="large"), 3000)
        assert store.used_bytes == 0


def outcome(
    requests: list[SimRequest], kv_host_bytes: int | None = None, prefix_bytes: int | None = None
) -> SimOutcome:
    box = parse_box("1xA100-80")
    policy = make_policy("gpupool", PolicyOptions())
    models = box_models(box, 1, Targets())
    device = BoxDevice(box.device_bytes, kv_host_bytes=kv_host_bytes)
    simulation = Simulation(models, policy, [device], prefix_bytes=prefix_bytes)
    return simulation.run(requests, 1000.0)


def ttfts_s(result: SimOutcome) -> list[float]:
    return [one.token_times_s[0] - one.request.arrival_s for one in result.results]


def test_a_later_turn_computes_what_is_new_and_copies_the_rest() -> None:
    first = SimRequest("r0", "m00", 0.0, 8000, 10, "c")
    second = SimRequest("r1", "m00", 100.0, 8100, 10, "c", 8010)
    stranger = replace(second, conversation="d")
    cold_s, warm_s = (ttfts_s(outcome([first, one]))[1] for one in (stranger, second))
    assert warm_s < cold_s / 3
    for options in ({"prefix_bytes": 0}, {"kv_host_bytes": 0}):
        assert ttfts_s(outcome([first, second], **options))[1] == pytest.approx(cold_s)


def test_all_tokens_come_with_kept_kv_as_without() -> None:
    drawn = Conversations(pause_s=5.0).draw(Draw(1, 0.5, 60.0, 3))
    for options in ({}, {"prefix_bytes": 0}, {"kv_host_bytes": 10**9}):
        result = outcome(list(drawn.requests), **options)
        for one in result.results:
            assert len(one.token_times_s) == one.request.output_tokens
            assert list(one.token_times_s) == sorted(one.token_times_s)


class TestDraw:
    def test_prompts_begin_with_the_turns_before(self) -> None:
        drawn = Conversations().draw(Draw(2, 0.2, 2000.0, 0))
        assert drawn.requests == Conversations().draw(Draw(2, 0.2, 2000.0, 0)).requests
        turns = defaultdict(list)
        for one in drawn.requests:
            turns[one.model, one.conversation].append(one)
        followed = 0
        for conversation in turns.values():
            for before, after in itertools.pairwise(conversation):
                assert after.history_tokens == before.prompt_tokens + before.output_tokens
                assert after.prompt_tokens > after.history_tokens
                followed += 1
        assert followed > len(drawn.requests) / 2
        assert len(drawn.requests) == pytest.approx(2 * 0.2 * 2000, rel=0.3)

    def test_what_is_missing_is_told(self) -> None:
        with pytest.raises(UsageError, match="need a number"):
            Conversations().draw(Draw(None, 0.1, 10.0, 0))


def test_a_trace_may_have_conversations() -> None:
    text = (
        "arrival_s,prompt_tokens,output_tokens,model,conversation\n"
        "0,100,10,a,x\n1,50,5,a,\n2,130,20,a,x\n3,130,20,b,x\n4,9,9,a,\n"
    )
    requests = trace_requests(parse_table(text.splitlines(), "trace"))
    assert [one.history_tokens for one in requests] == [0, 0, 110, 0, 0]
    assert [one.conversation for one in requests] == ["x", "", "x", "x", ""]
