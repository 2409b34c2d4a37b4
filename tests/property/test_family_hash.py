"""Models that differ in path and names only have one hash, by which vLLM finds compiled code."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("vllm", reason="the engine is not installed")

from vllm.config import ReasoningConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor import models

from gpupoold.checkpoints.files import read_json
from gpupoold.worker.engine.families import (
    TOKEN_READERS,
    UNREAD_FIELDS,
    family_hash,
    forget_changed_files,
    share_compiled_code,
)
from scripts.tiny_drafter import make_calm, make_eagle, make_eagle3, make_mtp
from tests.support.tiny_pooling import PoolingRecipe, make_pooling_checkpoint
from tests.support.tiny_vision import VISION_FAMILIES, make_vision_checkpoint

# vLLM's own warnings about a machine without GPU.
pytestmark = pytest.mark.filterwarnings("ignore")

# Fields of vLLM's configuration of a model that decide on the code, beside config.json.
OTHERS = {"dtype": "float16", "max_model_len": 128, "quantization": "fp8", "revision": "x"}


def config_of(path: Path, name: str, layout_digest: str, **options: Any) -> VllmConfig:
    arguments = EngineArgs(model=str(path), served_model_name=[name], max_model_len=64, **options)
    config = arguments.create_engine_config()
    share_compiled_code(config, layout_digest)
    return config


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
    is_read = name not in UNREAD_FIELDS
    assert (family_hash(changed) != family_hash(base)) == is_read, name


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Folders with a model and its drafter, by method: the same files twice."""
    folder, other = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    llama, qwen = (make_calm(folder, arch) for arch in ("llama", "qwen2"))
    mimo = make_mtp(qwen)
    drafters = {
        "eagle": (llama, make_eagle(llama)),
        "eagle3": (qwen, make_eagle3(qwen)),
        "draft_model": (llama, llama),
        "mtp": (mimo, mimo),
    }
    return {
        method: {
            "one": found,
            "two": [
                shutil.copytree(one, other / method / one.name, dirs_exist_ok=True) for one in found
            ],
        }
        for method, found in drafters.items()
    }


@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model", "mtp"])
def test_paths_of_drafters_do_not_matter(
    base: VllmConfig, drafting: dict[str, dict[str, Any]], method: str
) -> None:
    """Of drafters in folders of their own; each field of their config.json matters."""
    configs = []
    for path, drafter in drafting[method].values():
        drafts = {"method": method, "num_speculative_tokens": 3, "model": str(drafter)}
        configs.append(config_of(path, "name", "layout", speculative_config=drafts))
    one, two = configs
    assert one.compute_hash() == two.compute_hash() != base.compute_hash()
    assert one.speculative_config is not None
    drafter = one.speculative_config.draft_model_config
    written = read_json(Path(drafter.model) / "config.json")
    numbers = {name: value for name, value in written.items() if type(value) in (int, float)}
    assert len(numbers) > 5
    for name, value in numbers.items():
        changed = copy.copy(one)
        changed.speculative_config = copy.copy(one.speculative_config)
        changed.speculative_config.draft_model_config = other = copy.copy(drafter)
        other.hf_config = copy.deepcopy(drafter.hf_config)
        setattr(other.hf_config, name, 2 * value + 1)
        assert changed.compute_hash() != one.compute_hash(), name
    share_compiled_code(two, "other")
    assert one.compute_hash() != two.compute_hash()


@pytest.mark.parametrize("field", sorted(UNREAD_FIELDS))
def test_fields_that_no_step_reads_do_not_make_a_family(
    base: VllmConfig, folders: list[Path], tmp_path: Path, field: str
) -> None:
    path = shutil.copytree(folders[1], tmp_path / "other")
    changes = {field: False if field == "use_cache" else 7}
    write_json(path / "config.json", read_json(path / "config.json") | changes)
    assert family_hash(config_of(path, "other", "layout")) == family_hash(base)


def test_only_known_models_read_these_tokens() -> None:
    """Of text models; a model with images, or that pools, is compared with all fields."""
    readers = {
        path.stem
        for path in Path(models.__file__).parent.glob("*.py")
        if re.search(r"config\.(bos|eos|pad)_token_id|config\.use_cache", path.read_text())
    }
    of_other_kinds = {"roberta", "moondream3", "glm4v", "kanana_v", "whisper", "funaudiochat"}
    assert readers == of_other_kinds | {"longcat_flash_ngram"}
    assert TOKEN_READERS == ("LongcatFlashNgramForCausalLM",)


def test_other_files_of_a_checkpoint_make_a_family(
    base: VllmConfig, folders: list[Path], tmp_path: Path
) -> None:
    """Marks of the reasoning, the way to pool, and sizes of images."""
    thinking = shutil.copytree(folders[1], tmp_path / "thinking")
    arguments = EngineArgs(model=str(thinking), max_model_len=64)
    assert family_hash(arguments.create_engine_config()) == family_hash(base)
    arguments.reasoning_config = ReasoningConfig(
        reasoning_start_str="<t>", reasoning_end_str="</t>"
    )
    assert family_hash(arguments.create_engine_config()) != family_hash(base)
    made = {
        "1_Pooling/config.json": make_pooling_checkpoint(tmp_path, PoolingRecipe("bert-embed")),
        "preprocessor_config.json": make_vision_checkpoint(tmp_path, VISION_FAMILIES["qwen2_5_vl"]),
    }
    changes = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "max_pixels": 784}
    for file, path in made.items():
        before = family_hash(config_of(path, "made", "layout"))
        equal, other = (shutil.copytree(path, tmp_path / name) for name in (file[:3], file[3:6]))
        assert family_hash(config_of(equal, "equal", "layout")) == before
        write_json(other / file, read_json(other / file) | changes)
        assert family_hash(config_of(other, "other", "layout")) != before


def test_files_that_have_changed_are_read_again(tmp_path: Path) -> None:
    """Of a model that is removed, trained further, and added again from the same folder."""
    path = make_pooling_checkpoint(tmp_path, PoolingRecipe("bert-embed"))
    found, file = [], path / "1_Pooling" / "config.json"
    for changes in ({}, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}):
        write_json(file, read_json(file) | changes)
        forget_changed_files(str(path))
        pooler = config_of(path, "made", "layout").model_config.pooler_config
        assert pooler is not None
        found.append(pooler.seq_pooling_type)
    assert found == ["MEAN", "CLS"]


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


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
