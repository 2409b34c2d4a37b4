"""Choice of vLLM's parsers by the markup in a chat template. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpupoold.checkpoints.parsers.table import REASONING_RULES, TOOL_RULES, ParserRule

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
