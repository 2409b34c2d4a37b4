"""Search for a model's tool parser, reasoning parser and chat template in its small files.

All files are hostile until read: sizes are bounded, only regular files are opened, and a file that
is too large or no JSON counts as absent. The module imports neither torch nor vLLM, because the
daemon uses the module like workers and frontends do, and all must agree.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpupoold.checkpoints import layout
from gpupoold.checkpoints.files import MAX_TEMPLATE_BYTES, read_json
from gpupoold.checkpoints.parser_rules import REASONING_RULES, TOOL_RULES, ParserRule
from gpupoold.errors import Refused
from gpupoold.files import opened, read_bounded

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

# Names of the switch in templates of models that think only if asked to, or unless asked not to.
_SWITCH = r"(?<![\w.])(?:enable_)?thinking\b"
_ON_BY_DEFAULT = re.compile(
    rf"{_SWITCH}\s*\|\s*default\(\s*true"
    rf"|{_SWITCH} (?:is|is not|==|!=) false"
    rf"|{_SWITCH} is (?:not defined|undefined) or {_SWITCH}"
    rf"|{_SWITCH} is defined and not {_SWITCH}"
    rf"|if {_SWITCH} is defined else true"
    rf"|set (?:enable_)?thinking = true",
    re.IGNORECASE,
)
_IS_SWITCHED = re.compile(rf"(?:if|if not|elif|and|and not) {_SWITCH}|set (?:enable_)?thinking =")
_THINK = "<think>"
_THINK_TOKENS = (_THINK, "</think>")
_GENERATION_PROMPT = "add_generation_prompt"


@dataclass(frozen=True, slots=True)
class Finding:
    """A name that was found, None if there is none, and the reason in a few words."""

    name: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What a checkpoint says about the markup of its answers.

    ``template`` is None without a chat template; ``has_token`` returns whether the tokenizer has a
    token of that text, ``has_module`` whether a Python package is installed. ``response_fields``
    are the fields of the tokenizer's ``response_template``.
    """

    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    template: str | None
    has_token: Callable[[str], bool]
    has_module: Callable[[str], bool]
    response_fields: frozenset[str] = frozenset()


def find_tool_parser(chat: ChatFormat) -> Finding:
    """Return the name of vLLM's parser for the tool calls of a model."""
    finding = _first(TOOL_RULES, chat)
    if finding is not None:
        return finding
    if "tool_calls" in chat.response_fields:
        return Finding("hf", "the tokenizer's response_template has a field tool_calls")
    if chat.template is None:
        return Finding(None, "there is no chat template")
    if "tools" in chat.template:
        return Finding(None, "vLLM has no parser for the tool calls of the template")
    return Finding(None, "the template has no tools")


def find_reasoning_parser(chat: ChatFormat) -> Finding:
    """Return the name of vLLM's parser for the reasoning of a model."""
    finding = _first(REASONING_RULES, chat) or _by_switch(chat)
    if finding is not None:
        return finding
    if "thinking" in chat.response_fields and find_tool_parser(chat).name in (None, "hf"):
        return Finding("hf", "the tokenizer's response_template has a field thinking")
    if chat.template is None:
        return Finding(None, "there is no chat template")
    return Finding(None, "the template has no markup for reasoning in new answers")


def _first(rules: Sequence[ParserRule], chat: ChatFormat) -> Finding | None:
    """Return the result of the first rule that fits; None if no rule fits."""
    for rule in rules:
        kind = _kind(rule, chat)
        if kind is None or not _has_markup(rule, chat.template):
            continue
        facts = [f"the template writes {rule.markup}"] if rule.markup else []
        reason = "; ".join(facts + ([kind] if kind else []))
        if rule.parser is None:
            return Finding(None, f"{reason}: {rule.remark}")
        return _usable(rule.parser, reason, rule.tokens, rule.module, chat)
    return None


def _kind(rule: ParserRule, chat: ChatFormat) -> str | None:
    """Return the words for the model's kind: empty if any kind fits, None if another is needed."""
    if not rule.kinds:
        return ""
    for name in chat.architectures:
        if name in rule.kinds:
            return f"architecture {name}"
    for name in chat.model_types:
        if name.startswith(rule.kinds):
            return f"model type {name}"
    return None


def _has_markup(rule: ParserRule, template: str | None) -> bool:
    if template is None:
        return not rule.markers
    return all(marker in template for marker in rule.markers) and not any(
        marker in template for marker in rule.without
    )


def _usable(
    parser: str, reason: str, tokens: Sequence[str], module: str, chat: ChatFormat
) -> Finding:
    """Return the parser, or None if the tokenizer or the installation lacks its needs."""
    for token in tokens:
        if not chat.has_token(token):
            return Finding(None, f"{reason}, but the tokenizer has no token {token}")
    if module and not chat.has_module(module):
        return Finding(None, f"{reason}, but {parser} needs the Python package {module}")
    return Finding(parser, reason)


def _by_switch(chat: ChatFormat) -> Finding | None:
    """Return the parser of a model that writes its reasoning in <think>, by the default.

    A template that only removes reasoning from earlier answers does not count, because without
    reasoning a parser would take a whole answer for reasoning.
    """
    template = chat.template
    if template is None or _THINK not in template:
        return None
    prompt = template[template.rfind(_GENERATION_PROMPT) :] if template else ""
    if _ON_BY_DEFAULT.search(template):
        by_name = "enable_thinking" in template
        parser, when = ("qwen3" if by_name else "holo2"), "unless the request turns reasoning off"
    elif _IS_SWITCHED.search(template):
        parser, when = "deepseek_v3", "if the request turns reasoning on"
    elif _GENERATION_PROMPT in template and _THINK in prompt:
        is_qwen = any(name.startswith("qwen3") for name in chat.model_types)
        parser, when = ("qwen3" if is_qwen else "deepseek_r1"), "at the start of each answer"
    else:
        return None
    tokens = () if parser == "qwen3" else _THINK_TOKENS
    return _usable(parser, f"the template opens <think> {when}", tokens, "", chat)


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
