"""Values of engine options, parsed by vLLM's own parser of ``vllm serve``.

To be imported after the engine's environment has been set.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NoReturn

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:  # vLLM 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser  # type: ignore[import-not-found]
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # vLLM 0.32

from gpupoold.engine_options.names import ENGINE_HELP
from gpupoold.errors import UsageError

_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_ENGINE_FIELDS = frozenset(field.name for field in dataclasses.fields(EngineArgs))


class _OptionParser(FlexibleArgumentParser):  # type: ignore[misc, unused-ignore]
    """vLLM's parser, which raises an error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"an engine option is wrong: {message[:600]}", ENGINE_HELP)


def default_arguments() -> Namespace:
    """Return the arguments of a ``vllm serve`` without options; a new object each time."""
    return copy.deepcopy(_parse([]))  # the parser's default lists are shared


def parse_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of engine options by the names of vLLM's arguments.

    Raises UsageError: vLLM has no such option, or does not accept a value.
    """
    words = [word for name, value in options.items() for word in _words(name, value)]
    parsed = vars(_parse(words))
    return {name: parsed[name] for name in {option.partition(".")[0] for option in options}}


def engine_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the parsed options that concern the engine; see ``parse_options``."""
    parsed = parse_options(options)
    return {name: value for name, value in parsed.items() if name in _ENGINE_FIELDS}


def _parse(words: list[str]) -> Namespace:
    try:
        parsed: Namespace = _parser().parse_args(words)
    except (TypeError, ValueError, argparse.ArgumentError) as error:
        raise UsageError(f"an engine option is wrong: {str(error)[:600]}", ENGINE_HELP) from error
    return parsed


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = make_arg_parser(_OptionParser())
    return parser


def _words(name: str, value: str) -> list[str]:
    first, dot, keys = name.partition(".")
    flag = f"--{first.replace('_', '-')}"
    # argparse offers no public look-up of an argument by its name.
    action = _parser()._option_string_actions.get(flag)
    if action is None:
        raise UsageError(f"vLLM has no engine option {first!r}", ENGINE_HELP)
    if dot:
        return [f"{flag}.{keys}={value}"]
    if action.nargs == 0:
        if value.lower() not in _WORDS:
            raise UsageError(f"the engine option {name!r} is {value[:80]!r}", "give true or false")
        return [flag if _WORDS[value.lower()] else f"--no-{first.replace('_', '-')}"]
    if action.nargs == "+":
        return [flag, *_items(name, value)]
    return [f"{flag}={value}"]


def _items(name: str, value: str) -> list[str]:
    """Return the items of a JSON list, or of a text with commas."""
    try:
        items = json.loads(value) if value.startswith("[") else value.split(",")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the engine option {name!r} is no JSON list: {error}", "") from error
    words = [str(item) for item in items]
    if not words or any(word.startswith("-") for word in words):
        raise UsageError(f"the engine option {name!r} has a wrong item", "give a JSON list")
    return words


def media_limits(given: Mapping[str, Any] | None, max_images: int) -> dict[str, Any]:
    """Return vLLM's ``limit_mm_per_prompt`` from a model's option of that name.

    ``max_images`` is the limit without the option. Audio and video are not served.
    """
    limits = {"image": max_images, "vision_chunk": max_images} | dict(given or {})
    return limits | {"audio": 0, "video": 0}
