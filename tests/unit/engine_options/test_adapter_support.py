"""The options of an engine that takes adapters."""

from __future__ import annotations

from typing import get_args

import pytest

from gpupoold.engine_options.names import (
    RANKS,
    check_num_adapters,
    check_options,
    max_rank,
    num_slots,
    options_for,
    with_adapter_support,
    without_adapter_support,
)
from gpupoold.errors import Refused


def test_the_ranks_are_those_of_vllm() -> None:
    config = pytest.importorskip("vllm.config.lora")
    assert get_args(config.MaxLoRARanks) == RANKS


def test_an_engine_without_these_options_takes_no_adapters() -> None:
    assert with_adapter_support({"seed": "1"}) == {"seed": "1"}
    assert num_slots({"seed": "1"}) == 0


def test_defaults_are_added() -> None:
    assert with_adapter_support({"max_lora_rank": "64"}) == {
        "max_lora_rank": "64",
        "max_loras": "4",
        "max_cpu_loras": "32",
        "enable_lora": "true",
    }
    given = {"max_loras": "40", "seed": "1"}
    full = with_adapter_support(given)
    assert (full["max_cpu_loras"], full["max_lora_rank"], full["seed"]) == ("40", "16", "1")
    assert without_adapter_support(full) == {"seed": "1"}
    assert (num_slots(given), max_rank(given)) == (40, 16)


@pytest.mark.parametrize(
    ("options", "rank", "changes"),
    [
        ({}, 8, {"max_lora_rank": "16", "max_loras": "4"}),
        ({}, 17, {"max_lora_rank": "32", "max_loras": "4"}),
        ({"max_loras": "2"}, 16, {}),
        ({"max_loras": "2"}, 300, {"max_lora_rank": "320"}),
        ({"max_lora_rank": "8"}, 8, {}),
        ({"max_lora_rank": "8"}, 9, {"max_lora_rank": "16", "max_loras": "4"}),
    ],
)
def test_changes_for_a_rank(options: dict[str, str], rank: int, changes: dict[str, str]) -> None:
    assert options_for(options, rank) == changes
    assert check_options(changes) == changes  # a user may give the same options
    assert options_for({**options, **changes}, rank) == {}


def test_the_number_of_adapters_is_bounded() -> None:
    check_num_adapters("base", {"max_loras": "2"}, 32)
    with pytest.raises(
        Refused, match="base would have 33 adapters, and its engine keeps at most 32"
    ):
        check_num_adapters("base", {"max_loras": "2"}, 33)
    check_num_adapters("base", {"max_loras": "2", "max_cpu_loras": "33"}, 33)


def test_vllm_accepts_the_options() -> None:
    parsing = pytest.importorskip("gpupoold.engine_options.parsing")
    parsed = parsing.engine_options(with_adapter_support({"max_lora_rank": "8"}))
    assert parsed == {"max_lora_rank": 8, "max_loras": 4, "max_cpu_loras": 32, "enable_lora": True}
