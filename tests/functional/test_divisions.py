"""vLLM's own modules decide whether a group of GPUs can divide a model, without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import pytest

from gpupool_state import KnownDivisions
from gpupoold.checkpoints.files import read_json
from gpupoold.checkpoints.survey import why_checkpoint_undivided
from gpupoold.config.schema import Settings, parse_settings
from gpupoold.control.models.inspection import Divisions, Inspector
from gpupoold.control.processes.child import ForkServer, execute
from gpupoold.domain import ModelName, ModelSpec

pytestmark = pytest.mark.slow

DEGREES = (1, 2, 3, 4, 8)


def settings_of(folder: Path) -> Settings:
    folders = {f"{name}_dir": str(folder) for name in ("state", "runtime", "log")}
    devices = [{"kind": "emulated", "gpus": degree} for degree in DEGREES]
    return parse_settings({"device": devices, "paths": folders}, "test")


def inspector(folder: Path) -> Inspector:
    return Inspector(settings_of(folder), cast(ForkServer, SimpleNamespace(fork=execute)))


async def test_vllm_finds_what_the_dimensions_of_the_text_model_do_not_show(
    vision_models: dict[str, Path], tmp_path: Path
) -> None:
    """The image encoder has two heads, the text model four."""
    path = vision_models["tiny-qwen2.5-vl"]
    config = read_json(path / "config.json")
    assert [one for one in DEGREES if not why_checkpoint_undivided(config, one)] == [1, 2, 4]
    known = cast(KnownDivisions, AsyncMock())
    divisions = Divisions(settings_of(tmp_path), inspector(tmp_path), known)
    spec = ModelSpec(ModelName("vision"), "vision", str(path))
    await divisions.check(spec)
    reasons = [divisions.why_not(spec, number) for number in range(len(DEGREES))]
    assert reasons == [
        "",
        "",
        "4 attention heads are not divisible by 3",
        "AssertionError: 2 is not divisible by 4",
        "4 attention heads are not divisible by 8",
    ]


async def test_vllm_divides_the_drafter_too(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """The model has four heads, the drafter two."""
    path = tiny_models["tiny-llama"]
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    config = read_json(path / "config.json")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    (drafter / "config.json").write_text(json.dumps(config | heads))
    options = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 2}
    engine = {"speculative_config": json.dumps(options)}
    spec = ModelSpec(ModelName("drafted"), "drafted", str(path), engine=engine)
    found = await inspector(tmp_path).check(spec, [2, 4])
    assert list(found) == [4]
    assert found[4].startswith("the drafter: ")
