"""The worker's book of orders."""

from __future__ import annotations

from gpupoold.wire.messages import RunTurn
from gpupoold.worker.turns.requests import Orders


def test_a_dropped_turn_leaves_nothing_and_may_be_ordered_again() -> None:
    orders = Orders()
    orders.take(RunTurn(1, "a", 0.1, "b"))
    orders.began(10.0)
    orders.drop()
    assert (orders.turn, orders.then, orders.began_s) == (None, None, None)
    orders.take(RunTurn(1, "a", 0.2))
    assert orders.turn is not None
    assert (orders.turn.quota_s, orders.began_s) == (0.2, None)
