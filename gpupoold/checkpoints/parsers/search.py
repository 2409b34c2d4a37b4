"""Reading of the small files of a checkpoint that tell the markup of its answers.

All files are hostile until read: sizes are bounded, only regular files are opened, and a file that
is too large or no JSON counts as absent.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpupoold.checkpoints import layout
from gpupoold.checkpoints.files import MAX_TEMPLATE_BYTES, read_json
from gpupoold.checkpoints.parsers.rules import (
    ChatFormat,
    Finding,
    find_reasoning_parser,
    find_tool_parser,
)
from gpupoold.errors import Refused
from gpupoold.regular_files import opened, read_bounded

MAX_VOCABULARY_BYTES = 256 << 20
_BLOCK_BYTES = 1 << 20
_MAX_TEMPLATES = 16
_MAX_NAMES = 16
_MAX_NAME_CHARACTERS = 128

_TEMPLATE_FILE = "chat_template.jinja"
_PROCESSOR_TEMPLATE_FILE = "chat_template.json"
_MISTRAL_TOKENIZER_FILE = "tekken.json"
_VOCABULARY_FILES = (
    "tokenizer_config.json",
    "added_tokens.json",
    "tokenizer.json",
    "vocab.json",
    _MISTRAL_TOKENIZER_FILE,
)
_TOOL_TEMPLATE, _DEFAULT_TEMPLATE = "tool_use", "default"
_NONE = "none"
_GIVEN = "set by the option {}"


@dataclass(frozen=True, slots=True)
class FoundParsers:
    """The parsers and the chat template of a model, each with the reason.

    The name of ``chat_template`` is the file, perhaps with the template's name inside the file.
    """

    tool: Finding
    reasoning: Finding
    chat_template: Finding


@dataclass(frozen=True, slots=True)
class _Templates:
    """Chat templates by name, and their origin."""

    texts: Mapping[str, str]
    origin: str
    reason: str

    def for_tools(self) -> str | None:
        return self.texts.get(_TOOL_TEMPLATE, self.default())

    def default(self) -> str | None:
        return self.texts.get(_DEFAULT_TEMPLATE)


_NO_TEMPLATES = _Templates({}, "", "the checkpoint has no chat template")


def found_parsers(path: Path, options: Mapping[str, str]) -> FoundParsers:
    """Return the parsers of the model in folder ``path``. Blocks on file access.

    The engine options ``tool_call_parser``, ``reasoning_parser`` and ``chat_template`` take
    precedence; ``none`` stands for no parser. The option ``tokenizer`` names another folder with a
    tokenizer and a template.
    """
    config = _read_json(path / layout.CONFIG_FILE)
    path = Path(options.get("tokenizer", path))
    tokenizer_config = _read_json(path / layout.TOKENIZER_CONFIG_FILE)
    templates = _templates(path, tokenizer_config, options.get("chat_template"))
    tool = _given(options, "tool_call_parser")
    reasoning = _given(options, "reasoning_parser")
    if _has_mistrals_tokenizer(path, options.get("tokenizer_mode", "auto")):
        tool = tool or Finding("mistral", "vLLM uses Mistral's own tokenizer")
        if reasoning is None and _has_token(path, "[THINK]"):
            reasoning = Finding("mistral", "Mistral's own tokenizer has the token [THINK]")
        templates = _Templates({}, "", "Mistral's own tokenizer renders the prompts")

    def chat(template: str | None) -> ChatFormat:
        return ChatFormat(
            architectures=_names(config.get("architectures")),
            model_types=_model_types(config),
            template=template,
            has_token=lambda token: _has_token(path, token),
            has_module=lambda name: importlib.util.find_spec(name) is not None,
            response_fields=_response_fields(tokenizer_config),
        )

    return FoundParsers(
        tool=tool or find_tool_parser(chat(templates.for_tools())),
        reasoning=reasoning or find_reasoning_parser(chat(templates.default())),
        chat_template=Finding(templates.origin or None, templates.reason),
    )


def _given(options: Mapping[str, str], option: str) -> Finding | None:
    if option not in options:
        return None
    name = options[option].strip()
    return Finding(None if name.lower() == _NONE else name, _GIVEN.format(option))


def _templates(path: Path, tokenizer_config: Mapping[str, Any], given: str | None) -> _Templates:
    """Return the chat templates in use: given ones, else those in files, as Transformers reads
    them.
    """
    inside = _named(tokenizer_config.get("chat_template"))
    reason = _GIVEN.format("chat_template")
    if given is not None:
        if given in inside:
            origin = f"{layout.TOKENIZER_CONFIG_FILE} ({given})"
            return _Templates(dict.fromkeys((_DEFAULT_TEMPLATE,), inside[given]), origin, reason)
        if "{" in given or "\n" in given:
            return _Templates({_DEFAULT_TEMPLATE: given}, "the option's text", reason)
        text = _read(Path(given))
        return _Templates({} if text is None else {_DEFAULT_TEMPLATE: text}, given, reason)
    text = _read(path / _TEMPLATE_FILE)
    if text is not None:
        further = _additional(path)
        return _Templates(further | {_DEFAULT_TEMPLATE: text}, _TEMPLATE_FILE, "in the checkpoint")
    if inside:
        names = "" if inside.keys() == {_DEFAULT_TEMPLATE} else f" ({', '.join(sorted(inside))})"
        return _Templates(inside, layout.TOKENIZER_CONFIG_FILE + names, "in the checkpoint")
    legacy = _named(_read_json(path / _PROCESSOR_TEMPLATE_FILE).get("chat_template"))
    if legacy:
        return _Templates(legacy, _PROCESSOR_TEMPLATE_FILE, "in the checkpoint")
    return _NO_TEMPLATES


def _named(value: object) -> dict[str, str]:
    """Return the templates of a JSON value: one text, or a list of names with texts."""
    if isinstance(value, str):
        return {_DEFAULT_TEMPLATE: value} if len(value) <= MAX_TEMPLATE_BYTES else {}
    found: dict[str, str] = {}
    for item in value[:_MAX_TEMPLATES] if isinstance(value, list) else ():
        if not isinstance(item, dict):
            continue
        name, text = item.get("name"), item.get("template")
        if isinstance(name, str) and isinstance(text, str) and len(text) <= MAX_TEMPLATE_BYTES:
            found[name[:_MAX_NAME_CHARACTERS]] = text
    return found


def _additional(path: Path) -> dict[str, str]:
    """Return the templates in the folder of further templates, by name."""
    try:
        with os.scandir(path / layout.TEMPLATE_FOLDER) as entries:
            names = sorted(entry.name for _, entry in zip(range(1000), entries, strict=False))
    except OSError:
        return {}
    files = [
        Path(path / layout.TEMPLATE_FOLDER / name) for name in names if name.endswith(".jinja")
    ]
    read = {file.stem: _read(file) for file in files[:_MAX_TEMPLATES]}
    return {name: text for name, text in read.items() if text is not None}


def _has_mistrals_tokenizer(path: Path, mode: str) -> bool:
    """Return whether vLLM uses Mistral's tokenizer: the weights are in Mistral's format too."""
    if mode != "auto" or not os.path.isfile(path / _MISTRAL_TOKENIZER_FILE):
        return mode == "mistral"
    return any(path.glob("consolidated*.safetensors"))


def _names(value: object) -> tuple[str, ...]:
    items = value[:_MAX_NAMES] if isinstance(value, list) else ()
    return tuple(item[:_MAX_NAME_CHARACTERS] for item in items if isinstance(item, str))


def _model_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the model type, then the type of a multimodal model's text model."""
    text_config = config.get("text_config")
    inner = text_config.get("model_type") if isinstance(text_config, dict) else None
    return _names([config.get("model_type"), inner])


def _response_fields(tokenizer_config: Mapping[str, Any]) -> frozenset[str]:
    template = tokenizer_config.get("response_template")
    fields = template.get("fields") if isinstance(template, dict) else None
    return frozenset(fields) if isinstance(fields, dict) else frozenset()


def _has_token(path: Path, token: str) -> bool:
    """Return whether a tokenizer's file has the token as a JSON text.

    The search does not parse the files: parsing 30 MB of JSON would keep other threads waiting.
    """
    wanted = {json.dumps(token, ensure_ascii=is_ascii).encode() for is_ascii in (True, False)}
    return any(
        any(word in block for word in wanted)
        for name in _VOCABULARY_FILES
        for block in _blocks(path / name, max(map(len, wanted)))
    )


def _blocks(file: Path, num_overlap: int) -> Iterator[bytes]:
    """Yield a file's content in blocks that overlap; nothing of an irregular or large file."""
    try:
        with opened(file) as content:
            if os.fstat(content.fileno()).st_size > MAX_VOCABULARY_BYTES:
                return
            end = b""
            while block := content.read(_BLOCK_BYTES):
                block = end + block
                yield block
                end = block[-num_overlap:]
    except OSError:
        return


def _read(file: Path) -> str | None:
    """Return the text of a template's file, None if absent, unreadable or too large."""
    try:
        return read_bounded(file, MAX_TEMPLATE_BYTES).decode()
    except (OSError, UnicodeDecodeError):
        return None


def _read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object, empty if the file is absent, too large or no JSON object."""
    try:
        return read_json(file)
    except Refused:
        return {}
