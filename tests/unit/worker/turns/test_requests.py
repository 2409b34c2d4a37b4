"""The requests of a worker, the deadline of the next token, and the daemon's orders."""

from __future__ import annotations

import math

import pytest

from gpupoold.domain import Targets
from gpupoold.wire.messages import RunTurn
from gpupoold.worker.turns.requests import Orders, RequestLedger


class Engines:
    """Numbers of tokens by model and request, as the engines know them."""

    def __init__(self) -> None:
        self.num_tokens: dict[tuple[str, str], int] = {}
        self.ledger = RequestLedger(lambda *key: self.num_tokens.get(key))
        self.ledger.add_model("m", Targets(1.0, 0.1))
        self.ledger.add_model("other", Targets(5.0, 0.1))

    def arrive(self, request_id: str, arrival_s: float, num_tokens: int = 0) -> None:
        self.num_tokens["m", request_id] = num_tokens
        self.ledger.arrive("m", request_id, arrival_s)


@pytest.fixture
def engines() -> Engines:
    return Engines()


def test_a_request_without_a_token_waits(engines: Engines) -> None:
    engines.arrive("r", 99.0)
    engines.arrive("resumed", 99.0, num_tokens=3)
    assert engines.ledger.num_live("m") == 2
    assert engines.ledger.num_waiting("m") == 1
    engines.num_tokens["m", "r"] = 1
    assert engines.ledger.num_waiting("m") == 0


def test_each_token_has_a_deadline(engines: Engines) -> None:
    engines.arrive("r", 99.0)
    assert engines.ledger.next_deadline_s("m") == 100.0
    engines.num_tokens["m", "r"] = 3
    assert engines.ledger.next_deadline_s("m") == pytest.approx(100.3)
    assert engines.ledger.next_deadline_of_all_s() == pytest.approx(100.3)


def test_new_targets_hold_for_live_requests(engines: Engines) -> None:
    engines.arrive("r", 99.0, num_tokens=2)
    engines.ledger.set_targets("m", Targets(2.0, 1.0))
    assert engines.ledger.next_deadline_s("m") == 103.0


def test_an_answer_that_ended_in_the_engine_has_no_deadline(engines: Engines) -> None:
    """The end is known to the engine before the ledger."""
    engines.arrive("r", 99.0)
    engines.arrive("ended", 10.0)
    del engines.num_tokens["m", "ended"]
    assert engines.ledger.next_deadline_s("m") == 100.0
    assert (engines.ledger.num_live("m"), engines.ledger.num_waiting("m")) == (2, 1)


def test_ended_requests_leave(engines: Engines) -> None:
    engines.arrive("r", 99.0)
    engines.arrive("s", 99.0)
    engines.ledger.finish("m", ["r", "unknown"])
    assert engines.ledger.live_requests("m") == ["s"]
    assert not engines.ledger.is_idle()
    engines.ledger.finish("m", ["s"])
    assert engines.ledger.is_idle()
    assert engines.ledger.next_deadline_of_all_s() == math.inf


def test_a_removed_model_takes_its_requests_along(engines: Engines) -> None:
    engines.arrive("r", 99.0)
    engines.ledger.remove_model("m")
    assert engines.ledger.is_idle()


def test_a_dropped_turn_leaves_nothing_and_may_be_ordered_again() -> None:
    orders = Orders()
    orders.take(RunTurn(1, "a", 0.1, "b"))
    orders.began(10.0)
    orders.drop()
    assert (orders.turn, orders.then, orders.began_s) == (None, None, None)
    orders.take(RunTurn(1, "a", 0.2))
    assert orders.turn is not None
    assert (orders.turn.quota_s, orders.began_s) == (0.2, None)
