"""Values of engine options, as vLLM's own parser reads them."""

from __future__ import annotations

from typing import Any

import pytest

from gpupoold.errors import UsageError

parsing = pytest.importorskip("gpupoold.engine_options.parsing")


@pytest.mark.parametrize(
    ("options", "parsed"),
    [
        ({}, {}),
        ({"max_num_seqs": "16"}, {"max_num_seqs": 16}),
        ({"max_num_batched_tokens": "2k"}, {"max_num_batched_tokens": 2000}),
        ({"enforce_eager": "false"}, {"enforce_eager": False}),
        ({"disable_sliding_window": "True"}, {"disable_sliding_window": True}),
        ({"speculative_config.method": "ngram"}, {"speculative_config": {"method": "ngram"}}),
        ({"hf_overrides": '{"a": {"b": 1}}'}, {"hf_overrides": {"a": {"b": 1}}}),
        ({"kv_cache_dtype_skip_layers": '["1", "2"]'}, {"kv_cache_dtype_skip_layers": ["1", "2"]}),
        ({"chat_template": "--{{ x }}\n"}, {"chat_template": "--{{ x }}\n"}),
    ],
)
def test_values(options: dict[str, str], parsed: dict[str, Any]) -> None:
    assert parsing.parse_options(options) == parsed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": "many"}, "--max-num-seqs: invalid int"),
        ({"kv_cache_dtype": "float3"}, "--kv-cache-dtype: invalid choice"),
        ({"enforce_eager": "maybe"}, "'enforce_eager' is 'maybe'"),
        ({"limit_mm_per_prompt": "{"}, "--limit-mm-per-prompt"),
        ({"kv_cache_dtype_skip_layers": "[1"}, "no JSON list"),
        ({"kv_cache_dtype_skip_layers": "--port"}, "wrong item"),
        ({"no_such": "1"}, "no engine option 'no_such'"),
    ],
)
def test_a_wrong_value_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parsing.parse_options(options)


def test_options_of_the_api_do_not_reach_the_engine() -> None:
    options = {"tool_call_parser": "hermes", "seed": "3"}
    assert parsing.engine_options(options) == {"seed": 3}
    assert set(parsing.parse_options(options)) == set(options)


def test_default_arguments_are_independent() -> None:
    first = parsing.default_arguments()
    first.middleware.append("x")
    assert parsing.default_arguments().middleware == []
