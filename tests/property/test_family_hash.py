"""Models that differ in path and names only have one hash, by which vLLM finds compiled code."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("vllm", reason="the engine is not installed")

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from gpupoold.checkpoints.files import read_json
from gpupoold.worker.engine.vllm_process import share_compiled_code

# vLLM's own warnings about a machine without GPU.
pytestmark = pytest.mark.filterwarnings("ignore")

# Fields of vLLM's configuration of a model that decide on the code, beside config.json.
OTHERS = {"dtype": "float16", "max_model_len": 128, "quantization": "fp8", "revision": "x"}


def config_of(path: Path, name: str, layout_digest: str) -> VllmConfig:
    arguments = EngineArgs(model=str(path), served_model_name=[name], max_model_len=64)
    share_compiled_code(str(path), layout_digest)
    return arguments.create_engine_config()


@pytest.fixture(scope="module")
def folders(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two folders with the same config.json."""
    return [
        shutil.copytree(tiny_models["tiny-llama"], tmp_path_factory.mktemp("family") / name)
        for name in ("base", "fine-tune")
    ]


@pytest.fixture(scope="module")
def base(folders: list[Path]) -> Iterator[VllmConfig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmConfig, "compute_hash", VllmConfig.compute_hash)
        yield config_of(folders[0], "base", "layout")


def test_path_and_names_do_not_matter(base: VllmConfig, folders: list[Path]) -> None:
    model = base.model_config
    assert config_of(folders[1], "fine-tune", "layout").compute_hash() == base.compute_hash()
    assert config_of(folders[1], "fine-tune", "other").compute_hash() != base.compute_hash()
    assert model.model == model.tokenizer == str(folders[0]), "the hash changed the configuration"


def test_code_of_the_checkpoint_is_not_shared(base: VllmConfig, folders: list[Path]) -> None:
    configs = [base, config_of(folders[1], "fine-tune", "layout")]
    hashes = set()
    for config in map(copy.deepcopy, configs):
        config.model_config.trust_remote_code = True
        config.model_config.hf_config.auto_map = {"AutoModel": "modeling.Model"}
        hashes.add(config.compute_hash())
    assert len(hashes) == 2


@settings(max_examples=100)
@given(data=st.data())
def test_each_field_of_the_configuration_matters(
    base: VllmConfig, folders: list[Path], data: st.DataObject
) -> None:
    written: dict[str, Any] = read_json(folders[0] / "config.json")
    fields = sorted(written.keys() - {"model_type", "dtype", "torch_dtype", "transformers_version"})
    name = data.draw(st.sampled_from(fields + list(OTHERS)))
    changed = copy.copy(base)
    changed.model_config = copy.deepcopy(base.model_config)
    if name in OTHERS:
        setattr(changed.model_config, name, OTHERS[name])
    else:
        hf_config = changed.model_config.hf_config
        setattr(hf_config, name, data.draw(other_than(getattr(hf_config, name))))
    assert changed.compute_hash() != base.compute_hash(), name


def other_than(value: Any) -> st.SearchStrategy[Any]:
    """Return values of the same type that differ from ``value``."""
    match value:
        case bool():
            return st.just(not value)
        case int():
            return st.integers(1, 1 << 20).filter(lambda one: one != value)
        case float():
            return st.floats(1e-9, 1e9).filter(lambda one: one != value)
        case str():
            return st.just(f"{value}-2")
        case list():
            return st.just([*value, "other"])
        case dict():
            return st.sampled_from(sorted(value)).flatmap(
                lambda key: other_than(value[key]).map(lambda one: value | {key: one})
            )
        case _:
            return st.just(7)
