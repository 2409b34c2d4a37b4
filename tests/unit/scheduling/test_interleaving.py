"""Models that are resident together take turns of a few steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpupoold.domain import Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import ModelCosts
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.rules import Rule
from tests.unit.scheduling.driver import GB, Driver

STEP_S = 0.01
COSTS = ModelCosts(prefill_base_s=0.01, prefill_token_s=1e-4, decode_base_s=STEP_S)
PAUSE_S = 0.04


def driver(models: str = "a b", tbt_s: float = 0.1, missing: int = 0) -> Driver:
    """One device with all models; ``missing`` bytes of the first are not there."""
    made = Driver(
        GpupoolPolicy(), models, targets=Targets(10.0, tbt_s), costs=COSTS, capacity_bytes=80 * GB
    )
    names = models.split()
    made.send(e.MemoryChanged(0, tuple((name, missing * (name == names[0])) for name in names)))
    return made


def decoding(box: Driver, *names: str) -> None:
    """Let each model have an answer under way."""
    for name in names:
        box.arrive(name, name)
        while box.running() != name:
            box.end_turn()
        box.now_s += STEP_S
        box.step(0, name)


def turns(box: Driver, num: int) -> list[tuple[str | None, float]]:
    """Let turns end when their quota is used, with a token for each step."""
    found: list[tuple[str | None, float]] = []
    for _ in range(num):
        name, quota_s = box.running(), box.quota_s()
        assert name is not None
        found.append((name, quota_s))
        for _ in range(round(quota_s / STEP_S)):
            box.now_s += STEP_S
            box.step(0, name)
        box.end_turn()
    return found


def test_two_models_pause_no_longer_than_four_hundredths_of_a_second() -> None:
    box = driver()
    decoding(box, "a", "b")
    box.end_turn()
    found = turns(box, 6)
    assert [name for name, _ in found] in (["a", "b"] * 3, ["b", "a"] * 3)
    assert [quota_s for _, quota_s in found] == pytest.approx([PAUSE_S] * 6)
    assert box.state.devices[0].turn_rule is Rule.INTERLEAVED


def test_four_models_share_the_pause() -> None:
    box = driver("a b c d")
    decoding(box, *"abcd")
    box.end_turn()
    found = turns(box, 8)
    assert {name for name, _ in found[:4]} == set("abcd")
    assert found[:4] == found[4:]
    assert [quota_s for _, quota_s in found] == pytest.approx([PAUSE_S / 3] * 8)


def test_the_time_is_shared_as_the_targets_need_it() -> None:
    box = driver()
    box.send(e.TargetsChanged("b", Targets(10.0, 0.4)))
    decoding(box, "a", "b")
    box.end_turn()
    assert dict(turns(box, 4)) == pytest.approx({"a": PAUSE_S, "b": PAUSE_S / 4})


def test_a_newcomer_ends_the_turn_of_another_at_once() -> None:
    box = driver()
    decoding(box, "a")
    began_s = box.state.devices[0].turn_began_s
    box.arrive("b", "new", at_s=box.now_s + 0.1)
    assert box.quota_s() == pytest.approx(box.now_s - began_s), "the turn ends with its step"
    box.end_turn()
    assert box.running() == "b"


def test_a_long_prompt_is_computed_in_chunks_between_single_steps() -> None:
    box = driver()
    decoding(box, "a")
    box.arrive("b", "long", prompt_tokens=5000)  # half a second
    box.end_turn()
    turn = box.state.devices[0].turn
    assert turn is not None
    assert turn.model == "b"
    assert turn.quota_s == pytest.approx(PAUSE_S)
    assert turn.chunk_tokens is not None
    assert 200 < turn.chunk_tokens < 400
    box.now_s += PAUSE_S
    box.end_turn()
    assert box.running() == "a"
    assert box.quota_s() == pytest.approx(STEP_S)


def test_turns_are_long_where_weights_move() -> None:
    box = driver(missing=GB)
    decoding(box, "a", "b")
    box.end_turn()
    assert box.quota_s() > 2 * PAUSE_S


def test_prompts_are_whole_again_when_weights_move() -> None:
    box = driver()
    decoding(box, "a", "b")
    box.end_turn()
    turn = box.state.devices[0].turn
    assert turn is not None
    assert turn.chunk_tokens is not None
    box.send(e.MemoryChanged(0, (("a", 75 * GB),)))
    box.state.devices[0].up = replace(box.state.devices[0].up, capacity_bytes=15 * GB)
    box.end_turn()
    turn = box.state.devices[0].turn
    assert turn is not None
    assert turn.chunk_tokens is None


def test_turns_are_planned_by_value_in_overload() -> None:
    box = driver(tbt_s=0.012)
    decoding(box, "a", "b")
    box.end_turn()
    assert box.quota_s() > 2 * PAUSE_S
    assert box.state.devices[0].turn_rule is not Rule.INTERLEAVED


def test_what_is_due_goes_first() -> None:
    """The last of three models, as its second token is due in 20 ms."""
    box = driver("a b c")
    box.send(e.TargetsChanged("c", Targets(1.0, 0.1)))
    decoding(box, *"abc")
    box.now_s = box.state.requests["c"].next_deadline_s - 0.02
    box.end_turn()
    assert box.running() == "c"
