"""A load that runs its model on all ranks: the same steps come before and after on each."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

from gpupoold.memory.group.link import Link, OrderBook, OrderCount, RankLost, run_orders
from gpupoold.worker.threads import TurnThread
from gpupoold.worker.weights.rank_loads import FollowerTurns, LeaderTurns

NUM_RUNS = 4
NUM_STEPS = 40


class Follower:
    """The thread of orders, and a load with as many runs as the leader's."""

    def __init__(self, link: Link) -> None:
        self.turns = FollowerTurns()
        self.done: list[str] = []
        self._orders = threading.Thread(target=self._run_orders, args=(link,))
        self._load = threading.Thread(target=load, args=(self.turns, self.done))
        self._orders.start()
        self._load.start()

    def step(self, number: int) -> None:
        self.done.append(f"step {number}")

    def hold(self) -> None:
        self.turns.hold()

    def _run_orders(self, link: Link) -> None:
        with suppress(RankLost):
            run_orders(link, [self], OrderCount())
        link.close()

    def join(self) -> None:
        self._load.join(10)
        self._orders.join(10)
        assert not self._load.is_alive()
        assert not self._orders.is_alive()


def load(turns: TurnThread, done: list[str]) -> None:
    """Run the model several times alone, with steps of other engines in between."""
    with turns.held():
        for number in range(NUM_RUNS):
            done.append(f"run {number}")
            turns.give_way()


def test_runs_of_a_load_come_between_the_same_steps_on_all_ranks() -> None:
    ours, theirs = Link.pair()
    orders, follower = OrderBook([ours]), Follower(theirs)
    turns, done = TurnThread(), list[str]()
    thread = threading.Thread(target=load, args=(LeaderTurns(turns, orders), done))
    thread.start()
    number = 0
    while thread.is_alive() or number < NUM_STEPS:
        orders.send("step", number)
        done.append(f"step {number}")
        number += 1
        turns.run(0.001)
    orders.wait()
    ours.close()
    follower.join()
    assert [one for one in done if one.startswith("run")] == [f"run {n}" for n in range(NUM_RUNS)]
    assert follower.done == done
