"""Token ids beyond a model's vocabulary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpupoold.frontend.vocabulary import counts_prompt, drop_beyond, num_embeddings, take_rows

SIZE = 100


class Mask(list[bool]):
    """A mask with the one method of a tensor that is used."""

    def tolist(self) -> list[bool]:
        return list(self)


def image(offset: int, length: int, mask: Mask | None = None) -> Any:
    where = SimpleNamespace(offset=offset, length=length, is_embed=mask)
    return SimpleNamespace(mm_position=where)


def request(token_ids: list[int], *features: Any) -> Any:
    return SimpleNamespace(prompt_token_ids=token_ids, mm_features=list(features) or None)


@pytest.mark.parametrize(
    ("one", "taken", "beyond"),
    [
        (request([]), [], None),
        (request([0, 99]), [0, 99], None),
        (request([0, 100, 200]), [0, 100, 200], 100),
        (request([1, 500, 500, 2], image(1, 2)), [1, 1, 1, 2], None),
        (request([500, 7, 7, 2], image(0, 1)), [7, 7, 7, 2], None),
        (request([500, 500], image(0, 2)), [0, 0], None),
        (request([1, 99, 99, 2], image(1, 2)), [1, 99, 99, 2], None),
        (request([500, 500, 500, 2], image(1, 2)), [500, 2, 2, 2], 500),
        (request([1, 500, 501, 2], image(1, 2, Mask([True, False]))), [1, 1, 501, 2], 501),
    ],
)
def test_prompts(one: Any, taken: list[int], beyond: int | None) -> None:
    shown = list(one.prompt_token_ids)
    before = one.prompt_token_ids
    assert take_rows(one, SIZE) == beyond
    assert one.prompt_token_ids == taken
    assert before == shown


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"prompt_logprobs": 0}, True),
    ],
)
def test_sampling_that_reads_columns_for_the_prompt(
    fields: dict[str, float], expected: bool
) -> None:
    none = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    params = SimpleNamespace(**{"prompt_logprobs": None} | none | fields)
    assert counts_prompt(params) is expected


@pytest.mark.parametrize(
    ("model_type", "text", "expected"),
    [
        ("llama", {"additional_vocab_size": 7}, 100),
        ("molmo", {}, 228),
        ("molmo2", {"additional_vocab_size": 7}, 107),
    ],
)
def test_rows(model_type: str, text: dict[str, int], expected: int) -> None:
    config = SimpleNamespace(
        hf_config=SimpleNamespace(model_type=model_type),
        hf_text_config=SimpleNamespace(**text),
        get_vocab_size=lambda: SIZE,
    )
    assert num_embeddings(config) == expected


def params(stops: set[int], own: list[int], words: list[list[int]] | None = None) -> Any:
    return SimpleNamespace(
        all_stop_token_ids=stops,
        stop_token_ids=own,
        bad_words_token_ids=words,
        _bad_words_token_ids=words,
    )


def test_what_no_answer_can_contain_is_not_masked() -> None:
    some = params({2, 100, -7}, [100, -7, 2], [[1], [3, 100], []])
    drop_beyond(some, SIZE)
    assert some.all_stop_token_ids == {2}
    assert some.stop_token_ids == [2]
    assert some._bad_words_token_ids == [[1], []]


def test_the_rest_stays_as_it_is() -> None:
    some = params({2}, [7])
    drop_beyond(some, SIZE)
    assert (some.all_stop_token_ids, some.stop_token_ids) == ({2}, [7])
    assert some._bad_words_token_ids is None
