"""Synthetic checkpoints: shapes of real models, written in pieces of one block."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from benchmarks.gpu import synthetic
from benchmarks.gpu.shapes import SHAPES, TINY_SHAPES, Shape, config, tensors
from benchmarks.gpu.synthetic import BLOCK_ELEMENTS, cuts, header, make_synthetic, weights_of
from gpupoold.latency.shape import builtin_shape, from_hf_config


@pytest.mark.parametrize(
    ("name", "num_parameters", "kv_bytes_per_token"),
    [
        ("1B", 1_235_814_400, 32 << 10),
        ("3B", 3_212_749_824, 112 << 10),
        ("8B", builtin_shape("Llama-3.1-8B").num_parameters, 128 << 10),
        ("14B", 14_770_033_664, 192 << 10),
    ],
)
def test_shapes_have_the_sizes_of_the_models_they_are_called_after(
    name: str, num_parameters: int, kv_bytes_per_token: int
) -> None:
    shape = SHAPES[name]
    assert shape.weight_bytes == 2 * num_parameters
    assert shape.kv_bytes_per_token == kv_bytes_per_token
    assert from_hf_config(config(shape)).kv_bytes_per_token == kv_bytes_per_token


def test_small_shapes_stand_for_all_of_the_large_ones() -> None:
    assert TINY_SHAPES.keys() == SHAPES.keys()
    for name, shape in SHAPES.items():
        small = TINY_SHAPES[name]
        assert (small.is_qwen2, small.is_tied) == (shape.is_qwen2, shape.is_tied)


def test_cuts_cover_a_tensor_from_any_place_of_the_block() -> None:
    assert list(cuts(25, 7, 10)) == [(0, 7, 3), (3, 0, 10), (13, 0, 10), (23, 0, 2)]
    assert list(cuts(3, 12, 10)) == [(0, 2, 3)]


def test_the_block_has_no_length_in_common_with_a_row() -> None:
    rows = {tensor.shape[-1] for shape in SHAPES.values() for tensor in tensors(shape)} - {1}
    assert all(BLOCK_ELEMENTS % row for row in rows)


def test_a_header_says_where_each_tensor_lies() -> None:
    found = tensors(TINY_SHAPES["8B"])
    data = header(found)
    assert len(data) == 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:])
    del entries["__metadata__"]
    ends = [entry["data_offsets"][1] for entry in entries.values()]
    assert ends[-1] == sum(tensor.num_bytes for tensor in found)
    assert [entry["data_offsets"][0] for entry in entries.values()] == [0, *ends[:-1]]


_SMALL = TINY_SHAPES | {"8B-FP8": replace(TINY_SHAPES["8B-FP8"], is_fp8=True)}


@pytest.fixture(params=["1B", "14B", "8B-FP8"])
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(synthetic, "write_tokenizer", lambda _: [0, 1])  # which takes seconds
    return make_synthetic(tmp_path, _SMALL[request.param])


def test_a_checkpoint_has_all_tensors_as_wide_as_they_should_be(made: Path) -> None:
    shape: Shape = _SMALL[json.loads((made / "gpupool_synthetic.json").read_text())["shape"]]
    expected = {tensor.name: tensor for tensor in tensors(shape)}
    with safe_open(weights_of(made), "pt") as file:
        assert set(file.keys()) == expected.keys()
        for name, tensor in expected.items():
            values = file.get_tensor(name).float()
            assert tuple(values.shape) == tensor.shape
            if "embed" not in name and "lm_head" not in name and values.numel() > 1000:
                assert values.std().item() == pytest.approx(tensor.std, rel=0.1)
    known = json.loads((made / "config.json").read_text())
    assert known["tie_word_embeddings"] is shape.is_tied


def test_one_without_its_weights_is_made_again(made: Path) -> None:
    shape = _SMALL[json.loads((made / "gpupool_synthetic.json").read_text())["shape"]]
    before = weights_of(made).read_bytes()
    weights_of(made).unlink()
    assert make_synthetic(made.parent, shape) == made
    assert weights_of(made).read_bytes() == before


def test_scales_of_fp8_weights_give_the_width_of_the_others(made: Path) -> None:
    shape = _SMALL[json.loads((made / "gpupool_synthetic.json").read_text())["shape"]]
    stds = {one.name: one.std for one in tensors(replace(shape, is_fp8=False))}
    with safe_open(weights_of(made), "pt") as file:
        for name in set(file.keys()):
            if name.endswith("_scale"):
                weight = name.removesuffix("_scale")
                values = file.get_tensor(weight).float() * file.get_tensor(name)
                assert values.std().item() == pytest.approx(stds[weight], rel=0.1)


def test_what_comes_out_is_not_what_went_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "write_tokenizer", lambda _: [0, 1])
    path = weights_of(make_synthetic(tmp_path, TINY_SHAPES["8B"]))
    with safe_open(path, "pt") as file:
        tables = [
            file.get_tensor(f"{name}.weight").float() for name in ("model.embed_tokens", "lm_head")
        ]
    likeness = (tables[0] * tables[1]).mean() / (tables[0].std() * tables[1].std())
    assert abs(likeness.item()) < 0.1
    assert not any(table[:2].any() for table in tables)
