"""Tiny checkpoints: sizes, names, determinism, and that Hugging Face's loaders take them."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpupoold.checkpoints import tiny
from gpupoold.errors import Refused, UsageError

MB = 1_000_000
ALL = sorted(tiny.ARCHITECTURES)
SCALED = [4 * MB, 10 * MB, 33 * MB, 100 * MB, 500 * MB, 1000 * MB]


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("size_bytes", SCALED)
def test_shape_comes_near_the_wanted_size(arch: str, size_bytes: int) -> None:
    architecture = tiny.ARCHITECTURES[arch]
    shape = tiny.shape_for(architecture, size_bytes)
    assert tiny.num_weight_bytes(architecture, shape) == pytest.approx(size_bytes, rel=0.05)
    assert shape.num_layers >= 2
    assert shape.intermediate_size % 64 == 0


@pytest.mark.parametrize(("size_bytes", "num_gpus"), [(60 * MB, 2), (60 * MB, 4), (100 * MB, 8)])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_group_can_divide_the_heads(arch: str, size_bytes: int, num_gpus: int) -> None:
    architecture = tiny.ARCHITECTURES[arch]
    shape = tiny.shape_for(architecture, size_bytes, num_gpus)
    assert shape.num_heads % (2 * num_gpus) == 0
    assert tiny.num_weight_bytes(architecture, shape) == pytest.approx(size_bytes, rel=0.05)


def test_a_size_that_no_group_can_divide() -> None:
    with pytest.raises(UsageError, match="that 8 GPUs can divide") as refused:
        tiny.shape_for(tiny.ARCHITECTURES["llama"], 4 * MB, 8)
    assert "choose between 43 MiB" in (refused.value.hint or "")


@pytest.mark.parametrize("size_bytes", [0, 1 * MB, 2000 * MB])
def test_size_out_of_range_names_the_limits(size_bytes: int) -> None:
    with pytest.raises(UsageError, match=r"choose between .* and 954 MiB"):
        tiny.shape_for(tiny.ARCHITECTURES["llama"], size_bytes)


@pytest.mark.parametrize(("arch", "dtype"), [("gpt", "float32"), ("llama", "int8")])
def test_unknown_choice_names_the_known_ones(tmp_path: Path, arch: str, dtype: str) -> None:
    with pytest.raises(UsageError, match="use "):
        tiny.make_checkpoint(tmp_path, tiny.Recipe(arch, 10 * MB, dtype))
    assert list(tmp_path.iterdir()) == []


def test_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "tiny-llama" / "config.json"
    precious.parent.mkdir()
    precious.write_text("{}")
    with pytest.raises(Refused, match="not a tiny checkpoint"):
        tiny.make_checkpoint(tmp_path, tiny.Recipe("llama", 4 * MB))
    assert precious.read_text() == "{}"


def test_command_line_reports_errors_with_their_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.main([str(tmp_path), "--size", "3 parsecs"]) == UsageError.exit_code
    assert "--size: '3 parsecs'" in capsys.readouterr().err
    assert tiny.main([str(tmp_path), "--size", "1MB", "--json"]) == UsageError.exit_code
    assert json.loads(capsys.readouterr().err)["code"] == "usage"


def test_architectures_differ_as_promised(tiny_models: dict[str, Path]) -> None:
    assert sorted(tiny_models) == ["tiny-llama", "tiny-mixtral", "tiny-qwen2", "tiny-qwen3"]
    configs = {
        name: json.loads((path / "config.json").read_text()) for name, path in tiny_models.items()
    }
    kv_shares = {
        name: config["num_key_value_heads"] / config["num_attention_heads"]
        for name, config in configs.items()
    }
    assert kv_shares == {
        "tiny-llama": 0.5,
        "tiny-mixtral": 0.5,
        "tiny-qwen2": 1.0,
        "tiny-qwen3": 0.5,
    }
    assert {config["head_dim"] for config in configs.values()} == {64}
    assert configs["tiny-mixtral"]["num_local_experts"] == 4


def test_same_arguments_give_the_same_bytes(
    tiny_models: dict[str, Path], tmp_path: Path, project_env: dict[str, str]
) -> None:
    made = make(tmp_path, project_env, "--arch=qwen3")
    assert digests(made) == digests(tiny_models["tiny-qwen3"])


@pytest.mark.slow
def test_remade_only_when_the_recipe_changes(tmp_path: Path, project_env: dict[str, str]) -> None:
    options = ["--arch=llama", "--size=4MB"]
    weights = make(tmp_path, project_env, *options) / "model.safetensors"
    first = weights.stat()
    assert first.st_mode & 0o777 == 0o644
    make(tmp_path, project_env, *options)
    assert weights.stat().st_mtime_ns == first.st_mtime_ns
    make(tmp_path, project_env, *options, "--dtype=bfloat16", "--seed=7")
    assert weights.stat().st_size == pytest.approx(first.st_size / 2, rel=0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama"]


def make(parent: Path, env: dict[str, str], *options: str) -> Path:
    command = [sys.executable, "-m", "gpupoold.checkpoints.tiny", str(parent), *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


LOADER = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
out = {}
for path in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    out[type(model).__name__] = {key: sorted(map(str, value)) for key, value in info.items()}
tokenizer = AutoTokenizer.from_pretrained(path)
call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": [call]},
    {"role": "tool", "content": "2"},
]
tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
def render(messages, tools=None):
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
text = "def f(x):\\n    return 'é€😀' <tool_call>"
print(json.dumps({
    "models": out,
    "plain": render(messages[1:2]),
    "tools": render(messages, tools),
    "round_trip": tokenizer.decode(tokenizer(text)["input_ids"]) == text,
    "ids": [tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)],
}))
"""


@pytest.mark.slow
def test_transformers_loads_every_tensor_and_the_template(
    tiny_models: dict[str, Path], project_env: dict[str, str]
) -> None:
    command = [sys.executable, "-c", LOADER, *map(str, tiny_models.values())]
    done = subprocess.run(command, env=project_env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert sorted(seen["models"]) == sorted(arch.hf_class for arch in tiny.ARCHITECTURES.values())
    assert not [info for info in seen["models"].values() if any(info.values())]
    assert seen["ids"] == [2, 0, 2048]
    assert seen["round_trip"]
    assert seen["plain"] == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert seen["tools"].startswith("<|im_start|>system\nBe brief.\nCall tools as <tool_call>")
    assert (
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>' in seen["tools"]
    )
    assert seen["tools"].endswith("<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n")
