"""How many tokens of a prompt are expected to have KV."""

from __future__ import annotations

from gpupoold.scheduling.observed import CachedPrompts


def learnt(*prompts: tuple[int, int], model: str = "m") -> CachedPrompts:
    cached = CachedPrompts()
    for prompt_tokens, cached_tokens in prompts:
        cached.observe(model, prompt_tokens, cached_tokens)
    return cached


def test_nothing_is_expected_without_experience() -> None:
    assert CachedPrompts().predict("m", 1000) == 0
    assert learnt((1000, 0)).predict("m", 1000) == 0
    assert learnt((1000, 960)).predict("another", 1000) == 0


def test_a_few_requests_are_believed_a_little() -> None:
    first = learnt((1000, 1000)).predict("m", 1000)
    many = learnt(*[(1000, 1000)] * 200).predict("m", 1000)
    assert first == 200
    assert 900 <= many < 1000


def test_later_turns_are_told_from_first_ones_by_their_length() -> None:
    cached = learnt(*[(100, 0), (2000, 1900)] * 100)
    assert cached.predict("m", 90) == 0
    assert 1500 < cached.predict("m", 1500 + 400) <= 1805


def test_what_is_expected_follows_the_latest_requests() -> None:
    cached = learnt(*[(1000, 1000)] * 200, *[(1000, 0)] * 200)
    assert cached.predict("m", 1000) < 20


def test_a_token_is_always_computed() -> None:
    cached = learnt(*[(1, 1)] * 100)
    assert cached.predict("m", 1) == 0
    assert learnt((10, 99)).predict("m", 10) <= 9


def test_a_model_can_be_forgotten() -> None:
    cached = learnt((1000, 1000))
    cached.forget("m")
    cached.forget("m")
    assert cached.predict("m", 1000) == 0
