"""Turns as they happened: what a device tells becomes turns with their switches."""

from __future__ import annotations

import time
from dataclasses import replace

from gpupoold.api.schemas import TurnInfo
from gpupoold.control.accounting.meters import TurnLog, largest_transfer
from gpupoold.wire import messages as m
from tests.unit.wire.samples import SWITCH


def switch(model: str, *, total_s: float = 0.5, weights: int = 1, kv: int = 0) -> m.SwitchRecord:
    return replace(
        SWITCH,
        device=0,
        model=model,
        at_s=1.0,
        total_s=total_s,
        weight_bytes=weights,
        kv_in_bytes=kv,
        kv_out_bytes=0,
    )


def outputs(model: str, *counts: int) -> m.StepOutputs:
    progress = [m.RequestProgress(f"r{i}", [7] * n) for i, n in enumerate(counts)]
    return m.StepOutputs(model, 2.0, [], progress)


def ended(
    model: str, began_s: float | None = 2.0, ended_s: float = 3.5, turn_id: int = 9
) -> m.TurnReport:
    return m.TurnReport(turn_id, model, began_s, ended_s, {})


def _began_s(turn: TurnInfo) -> float:
    return round(turn.began_at - time.time() + time.monotonic(), 1)


def test_a_turn_with_its_switch_and_tokens() -> None:
    log = TurnLog()
    log.switched(switch("a"))
    log.stepped(0, outputs("a", 1, 1))
    log.stepped(1, outputs("b", 5))
    log.stepped(0, outputs("a", 2))
    log.ended(0, ended("a"))
    [turn] = log.after(0, 10)
    assert (turn.id, turn.device, turn.model) == (1, 0, "a")
    assert (_began_s(turn), turn.seconds, turn.num_tokens) == (2.0, 1.5, 4)
    assert (turn.switch_kind, turn.switch_s, turn.did_run) == ("weights", 0.5, True)


def test_the_next_turn_starts_from_nothing() -> None:
    log = TurnLog()
    log.switched(switch("a"))
    log.stepped(0, outputs("a", 1))
    log.ended(0, ended("a"))
    log.ended(0, ended("b"))
    _, second = log.after(0, 10)
    assert (second.model, second.num_tokens) == ("b", 0)
    assert (second.switch_kind, second.switch_s) == ("none", 0.0)


def test_news_of_memory_and_turns_that_never_ran_are_no_turns() -> None:
    log = TurnLog()
    log.switched(switch("a"))
    log.ended(0, ended("a", began_s=None))
    assert log.after(0, 10) == []
    log.ended(0, ended("a"))
    assert log.after(0, 10)[0].switch_kind == "weights"  # it was for this one all along


def test_a_switch_in_two_parts_is_one() -> None:
    log = TurnLog()
    log.switched(switch("a", total_s=0.5))
    log.switched(switch("a", total_s=0.25, weights=0, kv=3))
    log.ended(0, ended("a"))
    [turn] = log.after(0, 10)
    assert (turn.switch_s, turn.switch_kind) == (0.75, "weights")


def test_a_switch_in_vain_is_kept_as_a_turn_that_did_not_run() -> None:
    log = TurnLog()
    log.switched(switch("a"))
    log.switched(switch("b"))
    log.ended(0, ended("b"))
    log.switched(switch("a"))
    log.ended(0, ended("c"))
    found = [(turn.model, turn.did_run, turn.switch_kind) for turn in log.after(0, 10)]
    assert found == [
        ("a", False, "weights"),
        ("b", True, "weights"),
        ("a", False, "weights"),
        ("c", True, "none"),
    ]
    assert _began_s(log.after(0, 10)[0]) == 1.5


def test_tokens_of_a_turn_that_was_called_off_are_not_the_next_ones() -> None:
    log = TurnLog()
    log.stepped(0, outputs("a", 3))
    log.stepped(0, outputs("b", 1))
    log.ended(0, ended("b"))
    assert log.after(0, 10)[0].num_tokens == 1
    log.stepped(0, outputs("a", 3))
    log.ended(0, ended("c"))
    assert log.after(0, 10)[1].num_tokens == 0


def test_a_device_that_dies_leaves_nothing_under_way() -> None:
    log = TurnLog()
    log.switched(switch("a"))
    log.stepped(0, outputs("a", 3))
    log.worker_down(0)
    log.ended(0, ended("a"))
    [turn] = log.after(0, 10)
    assert (turn.num_tokens, turn.switch_kind) == (0, "none")


def test_the_latest_are_kept_and_given() -> None:
    log = TurnLog(num_kept=3)
    for _ in range(5):
        log.ended(0, ended("a"))
    assert log.last_id == 5
    assert [turn.id for turn in log.after(0, 10)] == [3, 4, 5]
    assert [turn.id for turn in log.after(0, 2)] == [4, 5]
    assert [turn.id for turn in log.after(4, 10)] == [5]
    assert log.after(5, 10) == log.after(99, 10) == []


def test_kinds_of_switches() -> None:
    assert largest_transfer(None) == "none"
    assert largest_transfer(switch("a", weights=0)) == "pages"
    assert largest_transfer(switch("a", weights=0, kv=1)) == "kv"
    assert largest_transfer(switch("a", weights=1, kv=1)) == "weights"
