"""``add-preset``: a further name of a model with other defaults."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from gpupool_cli.diagnostics import say
from gpupool_cli.options import (
    BaseOption,
    NewNameArgument,
    TbtOption,
    TtftOption,
    read_pairs,
    set_once,
)
from gpupool_cli.session import open_client
from gpupoold.api.schemas_models import AddPresetRequest
from gpupoold.json_values import check_json_text


def add_preset(
    ctx: typer.Context,
    name: NewNameArgument,
    base: BaseOption,
    default: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A default for a field of requests, such as temperature=0.2 or "
            "chat_template_kwargs.enable_thinking=true; may be repeated.",
        ),
    ] = None,
    ttft: TtftOption = None,
    tbt: TbtOption = None,
) -> None:
    """Add a preset: a name with other defaults and targets for requests of a model.

    A value is JSON, or else text. `system_prompt` is a system message for conversations without
    one. `gpupool rm NAME` removes the preset.
    """
    request = AddPresetRequest(
        name=name, base=base, defaults=read_defaults(default or ()), ttft_s=ttft, tbt_s=tbt
    )
    with open_client(ctx) as client:
        model = client.add_preset(request)
    say(f"{name}: a preset of {model.name}")


def read_defaults(given: Iterable[str]) -> dict[str, Any]:
    """Return the defaults by the names of fields.

    Raises:
        UsageError: a default has no value or is repeated.
        Refused: a value is no JSON, for example an infinite number.
    """
    defaults: dict[str, Any] = {}
    for name, text in read_pairs(given, "--set", "temperature=0"):
        check_json_text(name, text)
        set_once(defaults, name, _value(text), "--set")
    return defaults


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
