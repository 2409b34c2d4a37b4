"""Checkpoint folders: what is read from good ones, and what is said about bad ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpupoold.checkpoints.check import CheckpointInfo, check_checkpoint, check_modules, is_pooling
from gpupoold.checkpoints.layout import files_to_download, is_weight_file
from gpupoold.errors import Refused
from tests.unit.checkpoints import samples

ROOT = Path(__file__).parents[3]

POOLING = "sentence_transformers.models.Pooling"
FILES = [
    "config.json",
    "model.safetensors",
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "2_Dense/pytorch_model.bin",
    "onnx/model.safetensors",
    "onnx/config.json",
    "1_Pooling/deep/config.json",
    "openvino/2_Dense/config.json",
]


def check(folder: Path, *, pickle: bool = False, code: bool = False) -> CheckpointInfo:
    return check_checkpoint(folder, allow_pickle=pickle, allow_remote_code=code)


def refusal(folder: Path, *, pickle: bool = False, code: bool = False) -> str:
    with pytest.raises(Refused) as caught:
        check(folder, pickle=pickle, code=code)
    assert str(folder) in caught.value.message
    return str(caught.value)


def without(files: dict[str, bytes], *names: str) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name not in names}


class TestGood:
    def test_single_file(self, tmp_path: Path) -> None:
        info = check(samples.write(tmp_path, samples.checkpoint()))
        assert info == CheckpointInfo(
            path=tmp_path,
            architecture="LlamaForCausalLM",
            model_type="llama",
            dtype="float16",
            weight_bytes=2 * samples.NUM_ELEMENTS,
            num_parameters=samples.NUM_ELEMENTS,
            elements=(("F16", samples.NUM_ELEMENTS),),
            max_position_embeddings=2048,
            quantization=None,
            weight_files=("model.safetensors",),
        )

    def test_shards(self, tmp_path: Path) -> None:
        info = check(samples.write(tmp_path, samples.sharded()))
        assert len(info.weight_files) == 2
        assert info.num_parameters == 2 * samples.NUM_ELEMENTS

    def test_index_selects_among_files(self, tmp_path: Path) -> None:
        extra = {"model.fp32.safetensors": samples.weights(dtype="float32")}
        info = check(samples.write(tmp_path, samples.sharded() | extra))
        assert "model.fp32.safetensors" not in info.weight_files

    def test_weights_in_mistral_format_win_as_in_the_engine(self, tmp_path: Path) -> None:
        extra = {"consolidated.safetensors": samples.weights()}
        info = check(samples.write(tmp_path, samples.sharded() | extra))
        assert info.weight_files == ("consolidated.safetensors",)

    def test_pickles_next_to_safetensors_do_not_matter(self, tmp_path: Path) -> None:
        info = check(samples.write(tmp_path, samples.checkpoint() | {"pytorch_model.bin": b"x"}))
        assert info.weight_files == ("model.safetensors",)

    def test_links_as_in_a_hub_cache(self, tmp_path: Path) -> None:
        blobs = samples.write(tmp_path / "blobs", samples.checkpoint())
        (tmp_path / "snapshot").mkdir()
        for name in os.listdir(blobs):
            (tmp_path / "snapshot" / name).symlink_to(blobs / name)
        assert check(tmp_path / "snapshot").num_parameters == samples.NUM_ELEMENTS

    @pytest.mark.parametrize(
        ("config", "dtype", "max_length"),
        [
            ({"torch_dtype": None, "dtype": "bfloat16"}, "bfloat16", 2048),
            ({"torch_dtype": "torch.float32"}, "float32", 2048),
            ({"torch_dtype": None}, "float16", 2048),
            ({"max_position_embeddings": None}, "float16", None),
            ({"max_position_embeddings": None, "n_positions": 99}, "float16", 99),
            (
                {
                    "torch_dtype": None,
                    "max_position_embeddings": None,
                    "text_config": {"dtype": "bfloat16", "max_position_embeddings": 5},
                },
                "bfloat16",
                5,
            ),
        ],
    )
    def test_configuration(
        self, config: dict[str, Any], dtype: str, max_length: int | None, tmp_path: Path
    ) -> None:
        info = check(samples.write(tmp_path, samples.checkpoint(**config)))
        assert (info.dtype, info.max_position_embeddings) == (dtype, max_length)

    def test_quantization(self, tmp_path: Path) -> None:
        config = {"quantization_config": {"quant_method": "awq"}}
        assert check(samples.write(tmp_path, samples.checkpoint(**config))).quantization == "awq"

    @pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "qwen.tiktoken"])
    def test_other_tokenizers(self, name: str, tmp_path: Path) -> None:
        files = without(samples.checkpoint(), "tokenizer.json") | {name: b""}
        assert check(samples.write(tmp_path, files)).num_parameters


class TestFolder:
    def test_missing(self, tmp_path: Path) -> None:
        assert "cannot be read: No such file" in refusal(tmp_path / "gone")

    def test_file_instead(self, tmp_path: Path) -> None:
        samples.write(tmp_path, {"model.safetensors": b""})
        assert "is a file (give the folder" in refusal(tmp_path / "model.safetensors")

    def test_without_config(self, tmp_path: Path) -> None:
        samples.write(tmp_path, without(samples.checkpoint(), "config.json"))
        assert "has no config.json" in refusal(tmp_path)

    def test_gguf(self, tmp_path: Path) -> None:
        assert "GGUF" in refusal(samples.write(tmp_path, {"model-q4.gguf": b""}))

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "is not valid JSON"),
            (b"{", "is not valid JSON"),
            (b"\xff\xfe", "is not valid JSON"),
            (b"[" * 100_000, "is not valid JSON"),
            (b"[]", "must hold a JSON object"),
            (b"{}", "names no model class under 'architectures'"),
            (b'{"architectures": []}', "names no model class"),
            (b'{"architectures": "Llama"}', "names no model class"),
            (b'{"architectures": [3]}', "names no model class"),
            (b"\xef\xbb\xbf{}", "is not valid JSON"),
        ],
    )
    def test_bad_config(self, content: bytes, said: str, tmp_path: Path) -> None:
        samples.write(tmp_path, samples.checkpoint() | {"config.json": content})
        assert said in refusal(tmp_path)

    def test_vision_model_without_processor(self, tmp_path: Path) -> None:
        files = samples.checkpoint(vision_config={"depth": 2})
        text = refusal(samples.write(tmp_path, files))
        assert "preprocessor_config.json" in text
        assert "copy the processor's files" in text

    @pytest.mark.parametrize(
        "name", ["preprocessor_config.json", "processor_config.json", "tekken.json"]
    )
    def test_vision_model_with_processor(self, name: str, tmp_path: Path) -> None:
        files = samples.checkpoint(vision_config={"depth": 2}) | {name: b"{}"}
        check(samples.write(tmp_path, files))

    def test_without_tokenizer(self, tmp_path: Path) -> None:
        samples.write(tmp_path, without(samples.checkpoint(), "tokenizer.json"))
        assert "has no tokenizer" in refusal(tmp_path)


class TestCode:
    @pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
    def test_auto_map(self, file: str, tmp_path: Path) -> None:
        files = samples.checkpoint()
        files[file] = json.dumps(json.loads(files[file]) | {"auto_map": {"A": "m.X"}}).encode()
        samples.write(tmp_path, files)
        told = refusal(tmp_path)
        assert str(tmp_path / file) in told
        assert "allow_remote_code = true" in told
        assert check(tmp_path, code=True).num_parameters

    def test_pickles(self, tmp_path: Path) -> None:
        files = without(samples.checkpoint(), "model.safetensors")
        files |= {"pytorch_model-00001.bin": bytes(80), "pytorch_model-00002.bin": bytes(20)}
        samples.write(tmp_path, files | {"training_args.bin": bytes(1000), "optimizer.pt": b"x"})
        told = refusal(tmp_path)
        assert "pytorch_model-00001.bin, pytorch_model-00002.bin" in told
        assert "allow_pickle = true" in told
        info = check(tmp_path, pickle=True)
        assert (info.weight_bytes, info.num_parameters) == (100, 50)


class TestWeights:
    def test_none(self, tmp_path: Path) -> None:
        samples.write(tmp_path, without(samples.checkpoint(), "model.safetensors"))
        assert "has no weights (*.safetensors)" in refusal(tmp_path)

    def test_no_tensors(self, tmp_path: Path) -> None:
        empty = {"model.safetensors": (2).to_bytes(8, "little") + b"{}"}
        samples.write(tmp_path, samples.checkpoint() | empty)
        assert "hold no tensors" in refusal(tmp_path)

    def test_missing_shard(self, tmp_path: Path) -> None:
        name = "model-00002-of-00002.safetensors"
        samples.write(tmp_path, without(samples.sharded(), name))
        assert f"1 of 2 weight files are missing: {name}" in refusal(tmp_path)

    def test_all_shards_missing(self, tmp_path: Path) -> None:
        files = {n: c for n, c in samples.sharded().items() if not n.endswith(".safetensors")}
        assert "2 of 2 weight files are missing" in refusal(samples.write(tmp_path, files))

    def test_truncated_shard(self, tmp_path: Path) -> None:
        name = "model-00002-of-00002.safetensors"
        files = samples.sharded()
        whole = len(files[name])
        files[name] = files[name][:-1]
        told = refusal(samples.write(tmp_path, files))
        assert str(tmp_path / name) in told
        assert f"{whole - 1} bytes" in told
        assert f"but {whole} (" in told

    def test_index_of_another_version(self, tmp_path: Path) -> None:
        files = samples.sharded()
        files["model-00002-of-00002.safetensors"] = samples.weights("c")
        told = refusal(samples.write(tmp_path, files))
        assert "'b.embed.weight' should be in model-00002-of-00002.safetensors" in told

    @pytest.mark.parametrize(
        "index", [b"{", b"{}", b'{"weight_map": {}}', b'{"weight_map": {"a": 1}}']
    )
    def test_bad_index(self, index: bytes, tmp_path: Path) -> None:
        files = samples.sharded() | {"model.safetensors.index.json": index}
        told = refusal(samples.write(tmp_path, files))
        assert "model.safetensors.index.json" in told

    def test_index_cannot_name_files_elsewhere(self, tmp_path: Path) -> None:
        samples.write(tmp_path, {"other.safetensors": samples.weights()})
        index = json.dumps({"weight_map": {"model.embed.weight": "../other.safetensors"}}).encode()
        files = samples.checkpoint() | {"model.safetensors.index.json": index}
        assert "files are missing" in refusal(samples.write(tmp_path / "m", files))


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys\n"
        "from gpupoold.checkpoints import check, download, resolve, survey\n"
        "heavy = {'torch', 'vllm', 'transformers', 'huggingface_hub', 'safetensors', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert result.stdout.strip() == "[]"


def test_modules_are_downloaded_with_the_model() -> None:
    wanted = files_to_download(FILES, allow_pickle=False, allow_remote_code=False)
    assert set(wanted) == set(FILES[:7])
    assert is_weight_file("2_Dense/model.safetensors")
    with_pickle = files_to_download(FILES, allow_pickle=True, allow_remote_code=False)
    assert set(with_pickle) == set(FILES[:8])
    plain = [name for name in FILES if name != "modules.json"]
    wanted = files_to_download(plain, allow_pickle=False, allow_remote_code=False)
    assert not any("/" in name for name in wanted)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([{"type": POOLING, "path": "1_Pooling"}], "has no config.json"),
        ([{"type": POOLING, "path": "../other"}], "outside of the checkpoint"),
        ([{"type": POOLING, "path": "/etc"}], "outside of the checkpoint"),
        ({"type": POOLING}, "is no list of modules"),
        ([{"type": POOLING}], "is no list of modules"),
        ([{"type": "x", "path": ""}] * 33, "is no list of modules"),
    ],
)
def test_missing_modules_are_told(tmp_path: Path, modules: object, reason: str) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(Refused, match=reason):
        check_modules(tmp_path)


def test_a_damaged_list_is_told(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[" * 100_000)
    with pytest.raises(Refused, match="is not valid JSON"):
        check_modules(tmp_path)


def test_the_pooling_folder_is_required(
    tiny_pooling_models: dict[str, Path], tmp_path: Path
) -> None:
    whole = tiny_pooling_models["tiny-bert-embed"]
    info = check_checkpoint(whole, allow_pickle=False, allow_remote_code=False)
    assert info.architecture == "BertModel"
    copy = shutil.copytree(whole, tmp_path / "copy")
    shutil.rmtree(copy / "1_Pooling")
    with pytest.raises(Refused, match=r"the module '1_Pooling' has no config\.json"):
        check_checkpoint(copy, allow_pickle=False, allow_remote_code=False)


def test_pooling_checkpoints_are_told_from_others(
    tiny_pooling_models: dict[str, Path], tmp_path: Path
) -> None:
    for path in tiny_pooling_models.values():
        [architecture] = json.loads((path / "config.json").read_text())["architectures"]
        assert is_pooling(path, architecture), path
    for architecture in ("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForConditionalGeneration"):
        assert not is_pooling(tmp_path, architecture)
