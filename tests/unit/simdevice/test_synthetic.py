"""Made-up tokens: valid, not special, the same every time."""

from __future__ import annotations

import pytest

from gpupoold.simdevice.models import Vocabulary, seed_of


@pytest.mark.parametrize("size", [0, 3, 100, 1999, 2000, 32_000, 152_064])
def test_ids_are_in_the_vocabulary_and_away_from_its_ends(size: int) -> None:
    ids = Vocabulary.of_size(size).token_ids(seed_of("r"), 0, 3000)
    assert min(ids) > 0
    assert max(ids) < (size or 2000)
    if size >= 2000:
        assert min(ids) >= 1300, "control tokens and single bytes come before"


def test_the_same_answer_in_pieces() -> None:
    vocabulary, seed = Vocabulary.of_size(32_000), seed_of("r")
    whole = vocabulary.token_ids(seed, 0, 10)
    assert vocabulary.token_ids(seed, 0, 4) + vocabulary.token_ids(seed, 4, 6) == whole
    assert len(set(whole)) == 10
    assert whole != vocabulary.token_ids(seed_of("s"), 0, 10)
