"""The weights of a drafter count in the size of the model that it drafts for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpupoold.checkpoints.survey import drafter_elements, estimate_weight_bytes
from gpupoold.errors import Refused
from tests.unit.checkpoints.test_fit import BF16, MIB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    header = json.dumps(
        {"fc.weight": {"dtype": "F32", "shape": [1024, 1024], "data_offsets": [0, 4 * MIB]}}
    ).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4 * MIB)
    (tmp_path / "model.safetensors").write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("form", ["whole", "dotted", "short"])
def test_a_drafter_in_a_folder_counts(folder: Path, form: str) -> None:
    engine = {
        "whole": {"speculative_config": json.dumps({"method": "eagle", "model": str(folder)})},
        "dotted": {"speculative_config.model": str(folder)},
        "short": {"spec_model": str(folder)},
    }[form]
    assert estimate_weight_bytes(BF16, "bfloat16", engine) == (16 + 2) * MIB
    assert estimate_weight_bytes(BF16, "float32", engine) == (32 + 4) * MIB


@pytest.mark.parametrize("method", ["mtp", "mimo_mtp"])
@pytest.mark.parametrize("form", ["whole", "dotted", "short"])
def test_a_module_in_the_models_checkpoint_counts_once(
    folder: Path, form: str, method: str
) -> None:
    path = str(folder / ".." / folder.name)
    engine = {
        "whole": {"speculative_config": json.dumps({"method": method, "model": path})},
        "dotted": {"speculative_config.method": method, "speculative_config.model": path},
        "short": {"spec_method": method, "spec_model": path},
    }[form]
    assert drafter_elements(engine, folder) == {}
    assert drafter_elements(engine, folder.parent) == {"F32": MIB}


def test_a_model_that_drafts_for_itself_counts_twice(folder: Path) -> None:
    engine = {"spec_method": "draft_model", "spec_model": str(folder)}
    assert drafter_elements(engine, folder) == {"F32": MIB}


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"speculative_config": json.dumps({"method": "ngram"})},
        {"speculative_config": json.dumps({"method": "mtp"})},
        {"speculative_config": json.dumps({"method": 7, "model": ["mtp"]})},
        {"speculative_config": json.dumps({"model": "org/drafter"})},
        {"speculative_config": "no JSON"},
        {"speculative_config": "[" * 100_000},
        {"speculative_config": "7"},
    ],
)
def test_nothing_else_counts(engine: dict[str, str]) -> None:
    assert drafter_elements(engine) == {}


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no weights"):
        drafter_elements({"spec_model": str(tmp_path)})
