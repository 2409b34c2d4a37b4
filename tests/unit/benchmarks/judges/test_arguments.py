"""Arguments of vLLM's tests as both servers get them."""

from __future__ import annotations

from benchmarks.judges.arguments import read_arguments
from gpupoold.engine_options.names import REFUSED
from gpupoold.engine_options.parsing import parse_options

WORDS = [
    *("--dtype", "bfloat16", "--max-model-len", "4096", "--enforce-eager", "-tp", "2"),
    *("--served-model-name", "one", "two", "--no-enable-prefix-caching", "--max-logprobs", "-1"),
    *("--reasoning-config.a", "b", "--tool-call-parser=hermes"),
    *(
        "--no-enable-prompt-tokens-details",
        "--api-server-count",
        "2",
        "--gpu-memory-utilization",
        "0.8",
    ),
]


def test_names_and_length_are_read_and_the_machine_is_left_out() -> None:
    read = read_arguments(WORDS)
    assert read.names == ("one", "two")
    assert read.max_model_len == 4096
    assert not {"dtype", "tp", "gpu_memory_utilization", "enforce_eager"} & set(read.options)


def test_vllm_gets_the_rest_as_given() -> None:
    assert read_arguments(WORDS).vllm_words == [
        *("--max-logprobs", "-1", "--reasoning-config.a", "b", "--tool-call-parser", "hermes"),
        *("--no-enable-prompt-tokens-details", "--api-server-count", "2"),
    ]


def test_gpupool_gets_options_of_a_model() -> None:
    read = read_arguments(WORDS)
    assert read.gpupool_engine == {
        "max_logprobs": "-1",
        "reasoning_config.a": "b",
        "tool_call_parser": "hermes",
        "enable_prompt_tokens_details": "false",
    }
    assert parse_options({"max_logprobs": "-1"})["max_logprobs"] == -1
    assert read.left_to_gpupool == ["api_server_count"]
    assert "api_server_count" in REFUSED


def test_arguments_may_be_absent() -> None:
    read = read_arguments([])
    assert (read.names, read.options, read.vllm_words) == ((), {}, [])


def test_generating_models_share_servers() -> None:
    one = read_arguments(["--max-model-len", "128", "--served-model-name", "a"]).shared()
    two = read_arguments(["--tool-call-parser", "hermes", "--enable-auto-tool-choice"]).shared()
    other = read_arguments(["--reasoning-parser", "qwen3"]).shared()
    assert one.key == two.key != other.key
    assert one.names == ("a",)
    assert parse_options(one.gpupool_engine)["tool_call_parser"] == "hermes"
