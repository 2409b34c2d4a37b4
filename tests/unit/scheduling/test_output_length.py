"""Predicted output lengths: means, windows and bounds on what is kept."""

from __future__ import annotations

import pytest

from gpupoold.scheduling.observed import (
    NUM_PROMPT_CLASSES,
    OutputLengthPredictor,
    prompt_class,
)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1024, 10), (1025, 11), (65_536, 16)],
)
def test_prompt_classes_are_powers_of_two(num_tokens: int, expected: int) -> None:
    assert prompt_class(num_tokens) == expected


def test_the_last_class_takes_all_longer_prompts() -> None:
    assert prompt_class(2**17) == prompt_class(2**40) == NUM_PROMPT_CLASSES - 1


def test_mean_of_the_class_then_the_model_then_the_default() -> None:
    predictor = OutputLengthPredictor(default_tokens=50, prior_requests=0)
    assert predictor.predict("m", 100) == 50
    for num_output_tokens in (10, 20, 60):
        predictor.observe("m", 100, num_output_tokens)
    predictor.observe("m", 1000, 310)
    assert predictor.predict("m", 128) == 30
    assert predictor.predict("m", 1000) == 310
    assert predictor.predict("m", 5000) == 100  # no such prompt yet: the model's mean
    assert predictor.predict("other", 100) == 50


def test_only_recent_requests_count() -> None:
    predictor = OutputLengthPredictor(window=3, prior_requests=0)
    for num_output_tokens in (1000, 1000, 10, 20, 30):
        predictor.observe("m", 100, num_output_tokens)
    assert predictor.predict("m", 100) == 20


def test_predicted_again_from_longer_answers() -> None:
    predictor = OutputLengthPredictor(default_tokens=50, prior_requests=0)
    assert predictor.predict_again("m", 100, 20) == 50
    assert predictor.predict_again("m", 100, 80) == 160
    for num_output_tokens in (10, 40, 60):
        predictor.observe("m", 100, num_output_tokens)
    predictor.observe("m", 1000, 500)
    assert predictor.predict_again("m", 100, 10) == 50
    assert predictor.predict_again("m", 100, 40) == 60
    assert predictor.predict_again("m", 100, 60) == 500  # none in the class, one of the model
    assert predictor.predict_again("m", 100, 500) == 1000


def test_models_are_bounded_the_longest_unseen_goes() -> None:
    predictor = OutputLengthPredictor(default_tokens=7, max_models=2, prior_requests=0)
    for model in ("a", "b", "a", "c"):
        predictor.observe(model, 10, 99)
    assert predictor.num_models == 2
    assert [predictor.predict(model, 10) for model in "abc"] == [99, 7, 99]
    predictor.forget("a")
    predictor.forget("never seen")
    assert predictor.predict("a", 10) == 7
    assert predictor.num_models == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: prompt_class(-1),
        lambda: OutputLengthPredictor().observe("m", 1, -1),
        lambda: OutputLengthPredictor().predict("m", -1),
    ],
)
def test_nonsense_is_named(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=r".+"):
        call()


def test_few_answers_are_drawn_to_the_mean_of_all() -> None:
    """Of the model: (2 * 10 + 4 * 100) / 6 = 70; of the class: (10 + 4 * 70) / 5 = 58."""
    predictor = OutputLengthPredictor(default_tokens=100, prior_requests=4)
    predictor.observe("a", 10, 10)
    predictor.observe("a", 1000, 10)
    assert predictor.predict("a", 5000) == pytest.approx(70)
    assert predictor.predict("a", 10) == pytest.approx(58)
