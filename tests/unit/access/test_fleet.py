"""Tests of ``access/fleet.py``."""

from __future__ import annotations

import pytest

from gpupoold.access import fleet

SECRET = "0123456789abcdef" * 4


def test_a_signature_is_of_one_request() -> None:
    value = fleet.sign(SECRET, "POST", "/v1/completions", b"body", 1e9)
    found = fleet.verified(SECRET, "POST", "/v1/completions", value, 1e9 + 30)
    assert found is not None
    assert found.covers(b"body")
    assert not found.covers(b"other")
    for secret, method, path, at_s in (
        (fleet.make_secret(), "POST", "/v1/completions", 1e9),
        ("", "POST", "/v1/completions", 1e9),
        (SECRET, "GET", "/v1/completions", 1e9),
        (SECRET, "POST", "/v1/chat/completions", 1e9),
        (SECRET, "POST", "/v1/completions", 1e9 + 61),
        (SECRET, "POST", "/v1/completions", 1e9 - 61),
    ):
        assert fleet.verified(secret, method, path, value, at_s) is None


@pytest.mark.parametrize("value", ["", "x", "t=1,d=2,s=3", "t=" + "9" * 40, "\x00"])
def test_other_texts_are_no_signatures(value: str) -> None:
    assert fleet.verified(SECRET, "POST", "/", value) is None


def test_a_changed_signature_is_refused() -> None:
    value = fleet.sign(SECRET, "POST", "/", b"")
    for position in range(len(value)):
        changed = (
            value[:position] + ("1" if value[position] != "1" else "2") + value[position + 1 :]
        )
        assert fleet.verified(SECRET, "POST", "/", changed) is None
