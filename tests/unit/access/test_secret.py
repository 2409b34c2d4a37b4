"""API keys as text: their form, their ids, what is stored of them."""

from __future__ import annotations

import pytest

from gpupoold.access.secret import digest_of, id_of, make_key, matches


def test_key_has_its_id_in_it_and_matches_its_digest() -> None:
    key = make_key()
    assert id_of(key.text) == key.id
    assert key.text == f"gpk_{key.id}_{key.text.rsplit('_', 1)[1]}"
    assert matches(key.text, key.digest)
    assert key.text not in key.digest


def test_no_two_keys_are_alike_and_each_has_128_bits_at_least() -> None:
    keys = [make_key() for _ in range(200)]
    assert len({key.id for key in keys}) == len({key.text for key in keys}) == 200
    secret = keys[0].text.rsplit("_", 1)[1]
    assert 62 ** len(secret) > 2**128
    # All of the alphabet is in use: 4,800 letters miss one of 62 about once in 10^33 runs.
    assert len(set("".join(key.text.rsplit("_", 1)[1] for key in keys))) == 62


def test_new_secret_of_a_key_keeps_its_id() -> None:
    old = make_key()
    new = make_key(old.id)
    assert new.id == old.id
    assert new.text != old.text
    assert not matches(old.text, new.digest)


@pytest.mark.parametrize(
    "text",
    ["", "none", "gpk_", "sk-abcdef", "gpk_12345678_short", "gpk_1234-678_" + "a" * 24],
    ids=["empty", "word", "prefix", "foreign", "short", "letters"],
)
def test_what_is_no_key_has_no_id(text: str) -> None:
    assert id_of(text) is None


def test_one_more_letter_is_another_key() -> None:
    key = make_key()
    assert id_of(key.text + "a") is None
    assert id_of(key.text + "\n") is None
    assert digest_of(key.text + "a") != key.digest
