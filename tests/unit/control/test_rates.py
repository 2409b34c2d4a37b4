"""Rates of API keys: counted in one place, whichever frontend asks."""

from __future__ import annotations

from gpupoold.access.rates import RateUse
from gpupoold.control.access import KeyRates


def test_requests_per_minute() -> None:
    rates = KeyRates()
    rates.set("web", 2, None, 100.0)
    begun = [rates.begin("web", 100.0) for _ in range(3)]
    assert begun == [("", 0.0), ("", 0.0), ("2 requests per minute", 30.0)]
    assert rates.begin("web", 130.0) == ("", 0.0)


def test_what_is_refused_is_not_counted() -> None:
    rates = KeyRates()
    rates.set("web", 1, None, 0.0)
    rates.begin("web", 0.0)
    for _ in range(5):
        rates.begin("web", 30.0)
    assert rates.begin("web", 60.0) == ("", 0.0)


def test_tokens_are_charged_when_they_are_known_and_the_debt_is_waited_out() -> None:
    rates = KeyRates()
    rates.set("web", None, 60, 100.0)
    rates.charge("web", 50, 100.0)
    assert rates.begin("web", 100.0) == ("", 0.0)
    rates.charge("web", 30, 100.0)
    assert rates.left("web", 100.0) == (None, -20.0)
    assert rates.begin("web", 100.0) == ("60 tokens per minute", 21.0)
    assert rates.begin("web", 121.0) == ("", 0.0)


def test_longest_wait_is_told() -> None:
    rates = KeyRates()
    rates.set("web", 1, 60, 0.0)
    rates.begin("web", 0.0)
    rates.charge("web", 70, 0.0)
    assert rates.begin("web", 0.0) == ("1 requests per minute", 60.0)
    rates.charge("web", 100, 0.0)
    assert rates.begin("web", 0.0) == ("60 tokens per minute", 111.0)


def test_other_limits_leave_what_was_used() -> None:
    rates = KeyRates()
    rates.set("web", 2, 100, 100.0)
    rates.begin("web", 100.0)
    rates.charge("web", 70, 100.0)
    rates.set("web", 4, 20, 100.0)
    rates.charge("web", 30, 100.0)
    assert rates.left("web", 100.0) == (1.0, -10.0)
    rates.set("web", None, None, 100.0)
    assert rates.left("web", 100.0) == (None, None)
    rates.set("web", 5, None, 100.0)
    assert rates.left("web", 100.0) == (5.0, None)


def test_unknown_keys_and_keys_without_limits_may_begin() -> None:
    rates = KeyRates()
    rates.set("web", 1, None, 0.0)
    rates.begin("web", 0.0)
    rates.forget("web")
    rates.charge("web", 5, 0.0)
    assert rates.begin("web", 0.0) == ("", 0.0)
    assert rates.left("web", 0.0) == (None, None)


def test_use_elsewhere_is_charged_but_not_counted() -> None:
    rates = KeyRates()
    rates.set("web", 3, 100, 0.0)
    rates.set("free", None, None, 0.0)
    rates.begin("web", 0.0)
    rates.begin("free", 0.0)
    rates.charge("web", 40, 0.0)
    rates.take("web", RateUse(2, 30), 0.0)
    rates.take("unknown", RateUse(2, 30), 0.0)
    assert rates.used == {"web": RateUse(1, 40)}
    assert rates.left("web", 0.0) == (0.0, 30.0)
    assert rates.begin("web", 0.0) == ("3 requests per minute", 20.0)
    assert rates.used == {"web": RateUse(1, 40)}
    rates.forget("web")
    assert rates.used == {}
