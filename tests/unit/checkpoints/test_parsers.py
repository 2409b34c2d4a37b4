"""The files from which parsers and chat template are found, some of them hostile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpupoold.checkpoints import parsers
from gpupoold.checkpoints.files import MAX_TEMPLATE_BYTES
from gpupoold.checkpoints.parsers import Finding, FoundParsers, found_parsers

HERMES = "tools <tool_call>{{ call | tojson }}</tool_call>"
MISTRAL = "[TOOL_CALLS]"
TEKKEN = json.dumps({"special_tokens": [{"token_str": "[THINK]"}]})


def write(path: Path, **files: Any) -> Path:
    """A folder with these files; objects become JSON."""
    for name, content in ({"config_json": {"model_type": "llama"}} | files).items():
        text = content if isinstance(content, str) else json.dumps(content)
        stem, _, ending = name.rpartition("_")
        (path / f"{stem}.{ending}").write_text(text)
    return path


def found(path: Path, **options: str) -> FoundParsers:
    return found_parsers(path, options)


def test_a_template_file_comes_first(tmp_path: Path) -> None:
    write(
        tmp_path,
        chat_template_jinja=HERMES,
        tokenizer_config_json={"chat_template": MISTRAL},
        chat_template_json={"chat_template": MISTRAL},
    )
    assert found(tmp_path) == FoundParsers(
        tool=Finding("hermes", "the template writes <tool_call> with JSON"),
        reasoning=Finding(None, "the template has no markup for reasoning in new answers"),
        chat_template=Finding("chat_template.jinja", "in the checkpoint"),
    )


def test_a_template_in_the_tokenizers_configuration(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config_json={"chat_template": HERMES})
    assert found(tmp_path).tool.name == "hermes"
    assert found(tmp_path).chat_template.name == "tokenizer_config.json"


def test_a_list_of_templates_has_one_for_tools(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "<think>{% if enable_thinking is false %}"},
        {"name": "tool_use", "template": HERMES},
        {"name": 5, "template": MISTRAL},
        "text",
    ]
    write(tmp_path, tokenizer_config_json={"chat_template": templates})
    assert found(tmp_path).tool.name == "hermes"
    assert found(tmp_path).reasoning.name == "qwen3"
    assert found(tmp_path).chat_template.name == "tokenizer_config.json (default, tool_use)"


def test_a_folder_of_further_templates(tmp_path: Path) -> None:
    write(tmp_path, chat_template_jinja="plain")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text(HERMES)
    assert found(tmp_path).tool.name == "hermes"


def test_the_template_of_a_processor_is_the_last(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config_json={}, chat_template_json={"chat_template": HERMES})
    assert found(tmp_path).tool.name == "hermes"
    assert found(tmp_path).chat_template.name == "chat_template.json"


def test_without_a_template(tmp_path: Path) -> None:
    assert found(write(tmp_path)).chat_template == Finding(
        None, "the checkpoint has no chat template"
    )


def test_the_text_models_type_counts(tmp_path: Path) -> None:
    config = {"model_type": "some_vl", "text_config": {"model_type": "granite"}}
    write(tmp_path, config_json=config, chat_template_jinja=HERMES)
    assert found(tmp_path).tool.name == "granite4"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_json", {"added_tokens": [{"content": "[TOOL_CALLS]"}]}),
        ("vocab_json", {"[TOOL_CALLS]": 5}),
        ("added_tokens_json", {"[TOOL_CALLS]": 5}),
        ("tokenizer_config_json", {"added_tokens_decoder": {"5": {"content": "[TOOL_CALLS]"}}}),
    ],
)
def test_a_token_is_found_in_any_file_of_the_tokenizer(
    tmp_path: Path, file: str, content: Any
) -> None:
    write(tmp_path, chat_template_jinja=MISTRAL)
    assert found(tmp_path).tool.name is None
    write(tmp_path, **{file: content})
    assert found(tmp_path).tool.name == "mistral"


@pytest.mark.parametrize("is_ascii", [True, False])
def test_a_token_across_blocks_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ascii: bool
) -> None:
    monkeypatch.setattr(parsers, "_BLOCK_BYTES", 16)
    names = ("calls▁begin", "calls▁end", "call▁begin", "call▁end")
    tokens = {f"<｜tool▁{name}｜>": 1 for name in names}
    (tmp_path / "vocab.json").write_text(json.dumps(tokens, ensure_ascii=is_ascii))
    write(tmp_path, chat_template_jinja="<｜tool▁calls▁begin｜>```json")
    assert found(tmp_path).tool.name == "deepseek_v3"


def test_a_template_inside_json_is_not_taken_for_tokens(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config_json={"chat_template": '{{ "[TOOL_CALLS]" }}'})
    assert found(tmp_path).tool.name is None


def test_mistrals_own_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, chat_template_jinja=HERMES, tekken_json=TEKKEN)
    assert found(tmp_path).tool.name == "hermes"  # the weights are in the other format
    (tmp_path / "consolidated.safetensors").touch()
    assert found(tmp_path).tool.name == "mistral"
    assert found(tmp_path).reasoning.name == "mistral"
    assert found(tmp_path).chat_template == Finding(
        None, "Mistral's own tokenizer renders the prompts"
    )


def test_the_mode_of_the_tokenizer_decides_too(tmp_path: Path) -> None:
    write(tmp_path, chat_template_jinja=HERMES, tekken_json=TEKKEN)
    assert found(tmp_path, tokenizer_mode="mistral").tool.name == "mistral"
    (tmp_path / "consolidated.safetensors").touch()
    assert found(tmp_path, tokenizer_mode="hf").tool.name == "hermes"


def test_another_tokenizer_has_another_template(tmp_path: Path) -> None:
    write(tmp_path, config_json={"model_type": "granite"}, chat_template_jinja="plain")
    other = tmp_path / "other"
    other.mkdir()
    write(other, chat_template_jinja=HERMES)
    assert found(tmp_path, tokenizer=str(other)).tool.name == "granite4"


def test_options_take_precedence(tmp_path: Path) -> None:
    write(tmp_path, chat_template_jinja=HERMES)
    given = found(tmp_path, tool_call_parser="xlam", reasoning_parser="None")
    assert given.tool == Finding("xlam", "set by the option tool_call_parser")
    assert given.reasoning == Finding(None, "set by the option reasoning_parser")


def test_the_template_of_an_option(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": ""}, {"name": "tool_use", "template": HERMES}]
    write(tmp_path, tokenizer_config_json={"chat_template": templates})
    file = tmp_path / "other.jinja"
    file.write_text("[func_name1(a=1)]")
    by_name = found(tmp_path, chat_template="tool_use")
    assert (by_name.tool.name, by_name.chat_template.name) == (
        "hermes",
        "tokenizer_config.json (tool_use)",
    )
    assert found(tmp_path, chat_template=str(file)).tool.name == "pythonic"
    assert found(tmp_path, chat_template="{{ messages }} functools[").tool.name == "phi4_mini_json"
    assert found(tmp_path, chat_template="/absent").tool.reason == "there is no chat template"


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{", "null", "[" * 100_000, '{"chat_template": 5}', '{"chat_template": {"a": 1}}'],
)
def test_a_broken_file_counts_as_absent(tmp_path: Path, text: str) -> None:
    files = ("config_json", "tokenizer_config_json", "chat_template_json")
    write(tmp_path, **dict.fromkeys(files, text))
    assert found(tmp_path).tool.reason == "there is no chat template"


def test_files_that_are_too_large_count_as_absent(tmp_path: Path) -> None:
    write(tmp_path, chat_template_jinja=HERMES + "x" * MAX_TEMPLATE_BYTES)
    write(tmp_path, tokenizer_config_json={"chat_template": HERMES, "a": "x" * (8 << 20)})
    assert found(tmp_path).tool.reason == "there is no chat template"


def test_a_large_vocabulary_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "MAX_VOCABULARY_BYTES", 10)
    write(tmp_path, chat_template_jinja=MISTRAL, vocab_json={"[TOOL_CALLS]": 5})
    assert found(tmp_path).tool.name is None


def test_pipes_and_folders_are_not_opened(tmp_path: Path) -> None:
    write(tmp_path)
    os.mkfifo(tmp_path / "chat_template.jinja")
    os.mkfifo(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").mkdir()
    assert found(tmp_path).tool.name is None


def test_names_in_reasons_are_short(tmp_path: Path) -> None:
    config = {"model_type": "granite" + "x" * 100_000, "architectures": ["y" * 100_000]}
    write(tmp_path, config_json=config, chat_template_jinja=HERMES)
    assert len(found(tmp_path).tool.reason) < 300


def test_an_absent_folder_has_no_parsers(tmp_path: Path) -> None:
    assert found(tmp_path / "absent").tool == Finding(None, "there is no chat template")
