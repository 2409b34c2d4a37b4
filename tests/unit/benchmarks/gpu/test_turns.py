"""Pieces that start together measure one after the other, whatever becomes of the others."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from benchmarks.gpu.turns import Turns


def test_the_environment_tells_what_it_was_made_from(tmp_path: Path) -> None:
    turns = Turns(tmp_path / "turns", ("a", "b-8B"))
    assert Turns.from_environment(turns.environment_of()) == turns
    assert Turns.from_environment({}) is None


def test_nobody_measures_before_all_have_started_and_the_order_is_kept(tmp_path: Path) -> None:
    turns = Turns(tmp_path, ("first", "second", "failing"))
    events: list[str] = []

    def piece(name: str, starts_s: float) -> None:
        time.sleep(starts_s)
        events.append(f"{name} started")
        with turns.measuring(name):
            events.append(f"{name} measures")
            time.sleep(0.1)
            events.append(f"{name} ends")

    threads = [
        threading.Thread(target=piece, args=("first", 0.2)),
        threading.Thread(target=piece, args=("second", 0.0)),
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.4)
    assert sorted(events) == ["first started", "second started"]
    turns.end("failing")  # as the runner does, however a piece ends
    for thread in threads:
        thread.join(10.0)
    assert events[2:] == ["first measures", "first ends", "second measures", "second ends"]


def test_a_piece_that_has_no_turn_does_not_wait(tmp_path: Path) -> None:
    with Turns(tmp_path, ("other",)).measuring("mine"):
        pass
    assert not list(tmp_path.iterdir())
