"""Dimensions from a checkpoint's configuration, and the bytes that follow."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

import pytest

from gpupoold.latency.shape import (
    NUMBERS,
    DataError,
    ModelShape,
    ShapeError,
    builtin_shape,
    builtin_shapes,
    from_hf_config,
    hardware,
    hardware_profiles,
    held_kv_heads,
    profile_from,
    why_undivided,
)

KIB = 1024

LLAMA_31_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
MIXTRAL_8X7B: dict[str, Any] = LLAMA_31_8B | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}

WANTED = {"A10", "A100-40", "A100-80", "H100", "H800", "H200", "H20", "L40S", "RTX 4090"}


@pytest.mark.parametrize(
    ("model", "kv_shape", "kib"),
    [
        ("Qwen-7B", (32, 2, 32, 128), 512),
        ("InternLM2.5-7B", (32, 2, 8, 128), 128),
        ("LLaMA-13B", (40, 2, 40, 128), 800),
        ("Qwen-72B", (80, 2, 64, 128), 2560),
    ],
)
def test_kv_per_token_as_in_aegaeon_table_1(
    model: str, kv_shape: tuple[int, ...], kib: int
) -> None:
    shape = builtin_shape(model)
    assert (shape.num_layers, 2, shape.num_kv_heads, shape.head_dim) == kv_shape
    assert shape.kv_bytes_per_token == kib * KIB


def test_config_of_a_known_model_is_its_builtin_shape() -> None:
    shape = from_hf_config(LLAMA_31_8B)
    assert shape == builtin_shape("Llama-3.1-8B")
    assert shape.num_parameters == 8_030_261_248
    assert shape.weight_bytes == 16_060_522_496


def test_mixture_of_experts_counts_all_weights_but_the_chosen_width() -> None:
    shape = from_hf_config(MIXTRAL_8X7B)
    assert shape.num_parameters == 46_702_792_704
    assert shape.intermediate_size == 2 * 14336


def test_small_experts_have_a_width_of_their_own() -> None:
    config = LLAMA_31_8B | {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
    }
    assert from_hf_config(config).intermediate_size == 4 * 1408


def test_first_qwen_states_both_projections_together() -> None:
    config = {
        "model_type": "qwen",
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 151936,
    }
    assert from_hf_config(config).intermediate_size == builtin_shape("Qwen-7B").intermediate_size


def test_gpt_names_and_default_width() -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_inner": None,
        "vocab_size": 50257,
        "tie_word_embeddings": True,
    }
    shape = from_hf_config(config)
    assert (shape.intermediate_size, shape.num_kv_heads, shape.head_dim) == (3072, 12, 64)
    # Without the 786,432 learned positions and the biases of the 124 million.
    assert shape.num_parameters == pytest.approx(124_439_808 - 786_432, rel=0.002)


def test_multimodal_config_and_given_numbers() -> None:
    shape = from_hf_config({"text_config": LLAMA_31_8B}, num_parameters=123, dtype="float32")
    assert (shape.num_parameters, shape.weight_bytes, shape.kv_bytes_per_token) == (
        123,
        492,
        256 * KIB,
    )


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"],
)
def test_missing_key_is_named(key: str) -> None:
    config = {name: value for name, value in LLAMA_31_8B.items() if name != key}
    with pytest.raises(ShapeError, match=rf"missing key {key}"):
        from_hf_config(config)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": "4096"}, "hidden_size must be a positive integer, got '4096'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        (
            {"num_attention_heads": 33},
            "hidden_size 4096 is not a multiple of num_attention_heads 33",
        ),
        ({"num_key_value_heads": 5}, "num_heads 32 is not a multiple of num_kv_heads 5"),
        ({"torch_dtype": "int3"}, "unknown dtype 'int3'"),
        ({"kv_lora_rank": 512}, "compressed KV"),
        ({"num_experts": 8}, "missing key num_experts_per_tok"),
    ],
)
def test_contradictions_are_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        from_hf_config(LLAMA_31_8B | change)


def test_shape_itself_refuses_nonsense() -> None:
    with pytest.raises(ShapeError, match="num_layers must be a positive integer, got -1"):
        ModelShape(-1, 1, 1, 1, 1, 1, 1)


def test_every_builtin_shape_has_a_source() -> None:
    text = resources.files("gpupoold.latency").joinpath("shapes.toml").read_text("utf-8")
    entries = tomllib.loads(text)
    assert entries.keys() == builtin_shapes().keys()
    assert all(entry["source"].startswith("config.json of ") for entry in entries.values())


def test_unknown_model_lists_the_known() -> None:
    with pytest.raises(DataError, match=r"'gpt-5'.*Llama-2-7B"):
        builtin_shape("gpt-5")


def entry(name: str) -> dict[str, Any]:
    text = resources.files("gpupoold.latency").joinpath("hardware.toml").read_text("utf-8")
    found: dict[str, Any] = tomllib.loads(text)[name]
    return found


def test_the_wanted_gpus_are_there() -> None:
    assert hardware_profiles().keys() == WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_every_number_has_a_source_and_a_plausible_unit(name: str) -> None:
    profile = hardware(name)
    assert set(profile.sources) == {*NUMBERS, "host_link"}
    assert all(len(text) > 15 for text in profile.sources.values())
    assert 20 * 2**30 < profile.memory_bytes < 150 * 2**30
    assert 5e11 < profile.memory_bandwidth_bytes_per_s < 5e12
    assert 1e14 < profile.bf16_flops < 1e15
    link = {"PCIe 4.0 x16": 32e9, "PCIe 5.0 x16": 64e9}[profile.host_link]
    assert 0.5 * link < profile.pcie_bandwidth_bytes_per_s < 0.9 * link
    taken_over = "taken over" in profile.sources["pcie_bandwidth_bytes_per_s"]
    assert taken_over is not profile.is_pcie_measured


def test_names_are_found_as_the_driver_writes_them() -> None:
    assert hardware("NVIDIA H100 80GB HBM3") is hardware("h100")
    assert hardware("rtx4090").name == "RTX 4090"
    names = [
        known.casefold()
        for profile in hardware_profiles().values()
        for known in (profile.name, *profile.aliases)
    ]
    assert len(names) == len(set(names))


def test_unknown_gpu_lists_the_known() -> None:
    with pytest.raises(DataError, match=r"'B9000'.*A10, .*RTX 4090"):
        hardware("B9000")


@pytest.mark.parametrize("key", [*NUMBERS, "host_link", "is_pcie_measured"])
def test_missing_number_is_named(key: str) -> None:
    broken = {name: value for name, value in entry("A10").items() if name != key}
    with pytest.raises(DataError, match=rf"\[A10\] has no {key}"):
        profile_from("A10", broken)


@pytest.mark.parametrize("key", [*NUMBERS, "host_link"])
def test_number_without_source_is_named(key: str) -> None:
    broken = entry("A10")
    del broken["sources"][key]
    with pytest.raises(DataError, match=rf"no source for {key}"):
        profile_from("A10", broken)


def test_number_that_is_not_positive_is_named() -> None:
    with pytest.raises(DataError, match="bf16_flops must be positive, got 0"):
        profile_from("A10", entry("A10") | {"bf16_flops": 0})


@pytest.mark.parametrize(
    ("degree", "dimensions", "said"),
    [
        (1, {"num_heads": 7, "num_kv_heads": 7, "width": 13, "vocab_size": 5}, ""),
        (4, {"num_heads": 64, "num_kv_heads": 8, "width": 29568, "vocab_size": 152064}, ""),
        (8, {"num_heads": 28}, "28 attention heads are not divisible by 8"),
        (8, {"num_heads": 32, "num_kv_heads": 2}, ""),
        (6, {"num_heads": 12, "num_kv_heads": 4}, "4 KV heads neither divide 6 nor are divisible"),
        (4, {"num_heads": 12, "num_kv_heads": 6}, "6 KV heads neither divide 4 nor are divisible"),
        (4, {"width": 10922}, "the feed-forward width of 10922 is not divisible by 4"),
        (8, {"vocab_size": 50257}, ""),
        (5, {"vocab_size": 50257}, "the padded vocabulary of 50304 is not divisible by 5"),
        (8, {}, ""),
    ],
)
def test_why_undivided(degree: int, dimensions: dict[str, int], said: str) -> None:
    found = why_undivided(degree, **dimensions)
    assert found.startswith(said) if said else found == ""


def test_fewer_kv_heads_than_gpus_are_copied() -> None:
    assert [held_kv_heads(2, degree) for degree in (1, 2, 4, 8)] == [2, 2, 4, 8]
