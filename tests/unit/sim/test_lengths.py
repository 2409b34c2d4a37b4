"""Token lengths: samplers, variants, files, the built-in table."""

from __future__ import annotations

import gzip
import statistics
from pathlib import Path
from random import Random

import pytest

from gpupoold.errors import UsageError
from gpupoold.sim.lengths import (
    Lengths,
    LengthSource,
    QuantileSampler,
    length_pairs,
    length_variant,
    read_table,
    select_scenario,
    sharegpt_lengths,
)
from tests.support.lengths import PairLengths


def load_lengths(path: Path, scenario: str | None = None) -> PairLengths:
    return PairLengths(length_pairs(select_scenario(read_table(path), scenario)))


def draws(source: LengthSource, count: int, seed: int = 7) -> list[Lengths]:
    rng = Random(seed)
    return [source.sample(rng) for _ in range(count)]


def test_constant_lengths_are_those_of_every_request() -> None:
    assert draws(Lengths(1, 10), 2) == [(1, 10), (1, 10)]


def test_variants_double_prompts_or_outputs_of_the_same_draws() -> None:
    sampler = sharegpt_lengths()
    plain = draws(sampler, 50)
    assert draws(length_variant(sampler, "ix1"), 50) == plain
    assert draws(length_variant(sampler, "ix2"), 50) == [(2 * p, o) for p, o in plain]
    assert draws(length_variant(sampler, "ox2"), 50) == [(p, 2 * o) for p, o in plain]
    with pytest.raises(UsageError, match=r"no length variant 'ix3' \(use one of ix1, ix2, ox2\)"):
        length_variant(sampler, "ix3")


def test_quantiles_are_joined_by_straight_lines() -> None:
    sampler = QuantileSampler((0.0, 0.5, 1.0), (100, 100, 200), (1, 11, 11))
    many = draws(sampler, 20_000)
    prompts = [prompt for prompt, _ in many]
    outputs = [output for _, output in many]
    assert sum(prompt == 100 for prompt in prompts) / len(many) == pytest.approx(0.505, abs=0.02)
    assert statistics.mean(prompts) == pytest.approx(125, abs=1)
    assert statistics.mean(outputs) == pytest.approx(8.5, abs=0.1)
    assert set(outputs) == set(range(1, 12))
    assert statistics.correlation(prompts, outputs) == pytest.approx(0, abs=0.03)


@pytest.mark.parametrize("quantiles", [(0.0, 0.9), (0.1, 1.0), (0.0, 0.5, 0.5, 1.0)])
def test_quantiles_rise_from_0_to_1(quantiles: tuple[float, ...]) -> None:
    values = [1] * len(quantiles)
    with pytest.raises(ValueError, match="rise from 0 to 1"):
        QuantileSampler(quantiles, values, values)


def test_built_in_lengths_have_the_means_of_their_source() -> None:
    """Means in the notice of the data file: 710.6 and 293.9 tokens."""
    many = draws(sharegpt_lengths(), 50_000)
    assert statistics.mean(prompt for prompt, _ in many) == pytest.approx(710.6, rel=0.02)
    assert statistics.mean(output for _, output in many) == pytest.approx(293.9, rel=0.02)
    assert min(min(pair) for pair in many) >= 1
    assert max(prompt for prompt, _ in many) <= 11_906
    assert max(output for _, output in many) <= 1_309


TWO_SCENARIOS = "scenario,arrival_s,prompt_tokens,output_tokens\na,0,5,6\nb,0,7,8\na,1,9,10\n"


def test_lengths_from_a_compressed_file_with_scenarios(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv.gz"
    path.write_bytes(gzip.compress(TWO_SCENARIOS.encode()))
    assert set(draws(load_lengths(path, "a"), 50)) == {(5, 6), (9, 10)}
    assert set(draws(load_lengths(path, "b"), 5)) == {(7, 8)}
    with pytest.raises(UsageError, match=r"several scenarios, name one \(known: a, b\)"):
        load_lengths(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prompt_tokens\n1\n", r"lengths.csv: line 1: no column output_tokens"),
        ("prompt_tokens,output_tokens\n3,0\n", "line 2, column output_tokens: 0 is less than 1"),
        ("prompt_tokens,output_tokens\n3.5,1\n", "column prompt_tokens: '3.5' is not a whole"),
    ],
)
def test_what_is_wrong_with_a_file_of_lengths(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=problem):
        load_lengths(path)
