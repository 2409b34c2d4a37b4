"""Names and bounds of engine options, vLLM's own arguments, and support for adapters."""

from __future__ import annotations

from typing import get_args

import pytest

from gpupoold.engine_options.names import (
    API_ONLY,
    MAX_OPTIONS,
    MAX_VALUE_CHARACTERS,
    OFFERED,
    RANKS,
    REFUSED,
    check_num_adapters,
    check_options,
    engine_part,
    max_rank,
    num_slots,
    options_for,
    with_adapter_support,
    without_adapter_support,
)
from gpupoold.errors import Refused, UsageError


def test_every_argument_of_vllm_is_in_one_table() -> None:
    parsing = pytest.importorskip("gpupoold.engine_options.parsing")
    arguments = {action.dest for action in parsing._parser()._actions} - {"help", "model_tag"}
    assert arguments == OFFERED | set(REFUSED)
    assert not OFFERED & set(REFUSED)


def test_options_of_the_api_are_those_without_a_field_of_the_engine() -> None:
    parsing = pytest.importorskip("gpupoold.engine_options.parsing")
    assert API_ONLY == OFFERED - parsing._ENGINE_FIELDS
    assert engine_part({"chat_template": "x", "seed": "1", "hf_overrides.a": "1"}) == {
        "seed": "1",
        "hf_overrides.a": "1",
    }


def test_names_are_written_as_on_the_command_line_or_with_underscores() -> None:
    options = {"max-num-seqs": "16", "--seed": "1", "hf_overrides.rope_theta": "10000"}
    assert check_options(options) == {
        "max_num_seqs": "16",
        "seed": "1",
        "hf_overrides.rope_theta": "10000",
    }


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"gpu-memory-utilization": "0.5"}, "gpu_memory_utilization", "divides the device's"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size", "assigns devices"),
        ({"worker_cls": "x"}, "worker_cls", "assigns devices"),
        ({"port": "1"}, "port", "serves HTTP"),
        ({"middleware": "x"}, "middleware", "loads no code"),
        ({"dtype": "float16"}, "dtype", "--dtype"),
        ({"max_num_seq": "1"}, "no engine option 'max_num_seq'", "max_num_seqs"),
        ({"quux": "1"}, "no engine option 'quux'", "vllm serve --help"),
        ({"max num": "1"}, "not the name", "max-num-seqs"),
        ({"a" * 65: "1"}, "not the name", "max-num-seqs"),
        ({"seed": "1", "--seed": "1"}, "given twice", "one value"),
        ({"seed": "x" * (MAX_VALUE_CHARACTERS + 1)}, "65,537 characters", "shorter"),
        ({"seed": "\0"}, "null character", "shorter"),
        ({"hf_overrides": "{}", "hf_overrides.a": "1"}, "exclude each other", "JSON"),
        ({"hf_overrides" + ".a" * 9: "1"}, "not the name", "max-num-seqs"),
        ({f"hf_overrides.a{i}": "1" for i in range(MAX_OPTIONS + 1)}, "65 engine", "JSON"),
    ],
)
def test_a_wrong_name_or_value_is_refused(options: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        check_options(options)
    assert hint in caught.value.hint


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
