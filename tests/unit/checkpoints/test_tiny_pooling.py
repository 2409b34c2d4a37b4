"""The tiny checkpoints that embed, rank or classify."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpupoold.checkpoints.check import check_checkpoint
from gpupoold.errors import UsageError
from tests.support.tiny_pooling import KINDS, PoolingRecipe, main, make_pooling_checkpoint


def test_every_kind_passes_the_checks(tiny_pooling_models: dict[str, Path]) -> None:
    assert set(tiny_pooling_models) == {f"tiny-{name}" for name in KINDS}
    for path in tiny_pooling_models.values():
        info = check_checkpoint(path, allow_pickle=False, allow_remote_code=False)
        assert info.dtype == "float32"
        assert info.weight_bytes > 1_000_000


def test_a_present_checkpoint_is_kept(
    tiny_pooling_models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_pooling_models["tiny-bert-rerank"]
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert make_pooling_checkpoint(path.parent, PoolingRecipe("bert-rerank")) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    assert main([str(path.parent), "--kind", "bert-rerank", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "tiny-bert-rerank"


@pytest.mark.parametrize(
    "recipe", [PoolingRecipe("gpt"), PoolingRecipe("bert-embed", hidden_size=100)]
)
def test_impossible_recipes_are_refused(tmp_path: Path, recipe: PoolingRecipe) -> None:
    with pytest.raises(UsageError):
        make_pooling_checkpoint(tmp_path, recipe)
    assert list(tmp_path.iterdir()) == []
