"""Names and bounds of engine options, and the tables against vLLM's own arguments."""

from __future__ import annotations

import pytest

from gpupoold.engine_options.names import (
    API_ONLY,
    MAX_OPTIONS,
    MAX_VALUE_CHARACTERS,
    OFFERED,
    REFUSED,
    check_options,
    engine_part,
)
from gpupoold.errors import UsageError


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
