"""Convertible decoders: chunks, velocities and who prefills, worked out by hand."""

from __future__ import annotations

import math

import pytest

from gpupoold.domain import Role, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import ModelCosts
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.policies.placement import (
    best_converted,
    best_prefiller,
    chunk_tokens,
    converted_in_s,
    convertible_velocity,
    prefill_in_s,
    would_delay_answers,
)
from gpupoold.scheduling.wait_estimate import first_token_in_s
from tests.unit.scheduling.driver import GB, Driver, migrations_in, sends

PREFILL, DECODE, MIXED = Role.PREFILL, Role.DECODE, Role.MIXED
# A prompt token takes 0.1 ms, a step 20 ms and 1 ms per answer; 90 of 100 ms may be used.
COSTS = ModelCosts(
    prefill_base_s=0.01, prefill_token_s=1e-4, decode_base_s=0.02, decode_sequence_s=0.001
)


def driver(*roles: Role, converts: bool = True, ttft_s: float = 2.0, models: str = "a") -> Driver:
    policy = GpupoolPolicy(converts_decoders=converts)
    box = Driver(policy, models, len(roles), costs=COSTS, targets=Targets(ttft_s, 0.1))
    for number, role in enumerate(roles):
        box.send(e.RoleSet(number, role))
    resident = tuple((name, 0) for name in models.split())
    box.send(*(e.MemoryChanged(number, resident) for number in range(len(roles))))
    return box


def decoding(box: Driver, count: int, device: int = 1) -> None:
    """Answers of short prompts on a device."""
    for number in range(count):
        name = f"d{number}"
        box.arrive("a", name, prompt_tokens=10)
        where = box.state.requests[name].device
        assert where is not None
        box.step(where, name)
        if box.state.requests[name].phase.name == "MOVING":
            box.send(e.Attached(name))
        assert box.place(name) == ("DECODING", device)


class TestChunks:
    def test_a_step_takes_what_keeps_it_in_time(self) -> None:
        """Ten answers: 30 ms, so 60 ms or 600 prompt tokens are left; 610, to whole 64s."""
        box = driver(PREFILL, DECODE)
        decoding(box, 10)
        batch = box.state.devices[1].batches["a"]
        assert chunk_tokens(batch) == 9 * 64
        assert convertible_velocity(batch, 1000) == pytest.approx(600 / 0.09)

    def test_with_nothing_to_decode_all_the_time_is_for_prompts(self) -> None:
        """10 ms for the prefill itself, 800 tokens in the other 80."""
        box = driver(DECODE)
        assert chunk_tokens(box.state.devices[0].batches["a"]) == 12 * 64

    def test_answers_that_are_late_alone_leave_one_grain(self) -> None:
        box = driver(PREFILL, DECODE)
        decoding(box, 80)  # steps of 100 ms
        batch = box.state.devices[1].batches["a"]
        assert chunk_tokens(batch) == (2 + 1) * 64
        assert convertible_velocity(batch, 1000) == 0.0

    def test_the_turn_of_a_decode_device_follows_its_batch(self) -> None:
        box = driver(PREFILL, DECODE)
        decoding(box, 1)
        turn = box.state.devices[1].turn
        assert turn is not None
        assert turn.chunk_tokens == 690 // 64 * 64
        decoding_more = [f"m{number}" for number in range(20)]
        for name in decoding_more:
            box.arrive("a", name, prompt_tokens=10)
            box.step(0, name)
            box.send(e.Attached(name))
        turn = box.state.devices[1].turn
        assert turn is not None
        assert turn.chunk_tokens == (490 + 21) // 64 * 64
        prefilling = box.arrive("a", "p")
        assert sends(prefilling) == [("p", 0)]
        turn = box.state.devices[0].turn
        assert turn is not None
        assert turn.chunk_tokens is None

    def test_a_device_that_does_both_takes_chunks_when_answers_would_be_late(self) -> None:
        box = driver(MIXED, ttft_s=1.0)
        decoding(box, 2, device=0)
        batch = box.state.devices[0].batches["a"]
        turn = box.state.devices[0].turn
        assert turn is not None
        assert turn.chunk_tokens is None
        box.arrive("a", "short", prompt_tokens=800)  # 90 ms: no reason
        assert not would_delay_answers(batch, 0.0, 0.0)
        # Second tokens are due at 1.1 s; 90 ms and 1.01 s and a step of 24 ms are more.
        box.arrive("a", "long", prompt_tokens=10_000)
        assert would_delay_answers(batch, 0.0, 0.0)
        assert not would_delay_answers(batch, 2.0, 0.5)  # late already, and given up
        turn = box.state.devices[0].turn
        assert turn is not None
        assert turn.chunk_tokens is not None


class TestWhere:
    def test_seconds_to_the_first_token(self) -> None:
        """0.11 s for each prompt of 1,000; a decode device with ten answers takes 6,667/s."""
        box = driver(PREFILL, DECODE)
        decoding(box, 10)
        box.arrive("a", "r1", prompt_tokens=1000)
        box.arrive("a", "r2", prompt_tokens=1000)
        prefiller, decoder = box.state.devices.values()
        box.arrive("a", "new", prompt_tokens=1000)
        new = box.state.requests["new"]
        assert new.device == 0
        assert prefill_in_s(new, prefiller) == pytest.approx(0.11 + 0.33)
        assert converted_in_s(new, decoder) == pytest.approx(1000 / (600 / 0.09))
        assert best_prefiller(new, [prefiller])[1] is prefiller
        assert best_converted(new, [decoder])[1] is decoder

    def test_a_prompt_goes_to_a_prefill_device_while_that_is_in_time(self) -> None:
        """0.7 of two seconds hold twelve prompts of 0.11 s; the thirteenth is converted."""
        box = driver(PREFILL, DECODE)
        for number in range(13):
            box.arrive("a", f"r{number}", prompt_tokens=1000)
        places = [box.state.requests[f"r{number}"].device for number in range(13)]
        assert places == [0] * 12 + [1]
        box.step(1, "r12")
        assert box.place("r12") == ("DECODING", 1)  # and is decoded there

    def test_an_estimate_goes_by_the_device_that_the_request_would_get(self) -> None:
        box = driver(PREFILL, DECODE)
        for number in range(12):
            box.arrive("a", f"r{number}", prompt_tokens=1000)
        in_s = first_token_in_s(box.state, box.state.models["a"], 1000, box.now_s)
        assert in_s is not None
        assert in_s < 0.3 < 12 * 0.11
        box.arrive("a", "new", prompt_tokens=1000)
        assert box.state.requests["new"].device == 1

    def test_not_if_decoders_are_not_to_convert(self) -> None:
        box = driver(PREFILL, DECODE, converts=False)
        for number in range(20):
            box.arrive("a", f"r{number}", prompt_tokens=1000)
        assert {one.device for one in box.state.requests.values()} == {0}

    def test_no_more_prompts_than_can_be_prefilled_within_the_target(self) -> None:
        """Equation 6: with no answers 8,889 tokens/s for 2 s, so that 17,778 tokens may wait."""
        box = driver(PREFILL, DECODE)
        for number in range(12):
            box.arrive("a", f"r{number}", prompt_tokens=1000)
        decoder = box.state.devices[1]
        for number in range(17):
            box.arrive("a", f"c{number}", prompt_tokens=1000)
        waiting = sum(one.waiting_tokens for one in decoder.working.values())
        assert 5000 <= waiting <= 17_778
        request = box.state.requests["r0"]
        request.prompt_tokens = 17_778 - waiting + 1000
        assert converted_in_s(request, decoder) == math.inf

    def test_first_tokens_go_to_the_decode_device_that_keeps_up(self) -> None:
        box = driver(PREFILL, DECODE, DECODE)
        targets = []
        for number in range(90):  # 80 answers make steps of 100 ms
            box.arrive("a", f"r{number}", prompt_tokens=10)
            migrations = migrations_in(box.step(0, f"r{number}"))
            targets += [target for _, _, target in migrations]
            box.send(e.Attached(f"r{number}"))
        assert targets[:70] == [targets[0]] * 70
        assert set(targets) == {1, 2}

    def test_answers_on_their_way_are_load(self) -> None:
        box = driver(PREFILL, DECODE, DECODE)
        targets = []
        for number in range(90):
            box.arrive("a", f"r{number}", prompt_tokens=10)
            targets += [target for _, _, target in migrations_in(box.step(0, f"r{number}"))]
        assert set(targets) == {1, 2}

    def test_without_room_an_answer_stays_where_it_is(self) -> None:
        box = Driver(
            GpupoolPolicy(), "a", 2, costs=COSTS, kv_host_bytes=0, capacity_bytes=11 * GB
        )  # 1 GB of KV: 10,000 tokens
        box.send(e.RoleSet(0, PREFILL), e.RoleSet(1, DECODE))
        for name in ("r1", "r2"):
            box.arrive("a", name, prompt_tokens=6000)
        assert migrations_in(box.step(0, "r1")) == [("r1", 0, 1)]
        assert box.place("r2")[0] == "SENT"
        assert migrations_in(box.step(0, "r2")) == []
        box.send(e.Attached("r1"))
        assert migrations_in(box.send(e.Ended("r1"))) == [("r2", 0, 1)]


def test_a_prefill_device_orders_models_by_first_tokens_alone() -> None:
    """b's prompt is due first; the ten of a would take 1.1 s, answers are of no account."""
    box = driver(PREFILL, DECODE, models="a b c", ttft_s=5.0, converts=False)
    box.arrive("c", "c1", at_s=0.0)
    for number in range(10):
        box.arrive("a", f"a{number}", at_s=0.2, prompt_tokens=1000)
    box.send(e.TargetsChanged("b", Targets(1.0, 0.1)))
    box.arrive("b", "b1", at_s=0.3, prompt_tokens=1000)
    assert box.state.devices[0].then == "b"
