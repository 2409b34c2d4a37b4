"""Settings as the text of a configuration file."""

from __future__ import annotations

import json
import re

from gpupool_cli.output import NOTHING
from gpupoold.api.schemas_config import ConfigInfo, SettingInfo

_LIST_INDEX = re.compile(r"\[\d+\]$")


def as_toml(info: ConfigInfo, *, with_origin: bool) -> str:
    """Return all keys under their sections; ``with_origin`` adds each value's origin.

    The arithmetic of values that were worked out is always added.

    The text is valid TOML: keys that are not set, or hidden, are comments.
    """
    sections: dict[str, list[SettingInfo]] = {}
    for one in info.settings:
        sections.setdefault(one.key.rpartition(".")[0], []).append(one)
    blocks = [_block(name, settings, with_origin) for name, settings in sections.items()]
    if with_origin:
        source = f"from {info.path}" if info.path else "without a file"
        blocks.insert(0, f"# The settings of gpupoold, {source}.")
    return "\n\n".join(blocks)


def value_text(value: object) -> str:
    """Return a value in TOML; a dash for none."""
    if value is None:
        return NOTHING
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    # JSON strings are TOML strings, except for one character that TOML requires escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def _block(name: str, settings: list[SettingInfo], with_origin: bool) -> str:
    is_listed = _LIST_INDEX.search(name)
    header = f"[[{_LIST_INDEX.sub('', name)}]]" if is_listed else f"[{name}]"
    lines = [(_line(one), _comment(one, with_origin)) for one in settings]
    width = max(len(line) for line, _ in lines)
    shown = [f"{line:<{width}}  # {comment}" if comment else line for line, comment in lines]
    return "\n".join([header, *shown])


def _comment(one: SettingInfo, with_origin: bool) -> str:
    if one.reason:
        return f"{one.origin}: {one.reason}"
    return one.origin if with_origin else ""


def _line(one: SettingInfo) -> str:
    key = one.key.rpartition(".")[2]
    if one.is_hidden:
        return f"# {key} is hidden"
    return f"# {key} is not set" if one.value is None else f"{key} = {value_text(one.value)}"
