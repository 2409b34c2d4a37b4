"""``key``: manage the keys of the HTTP API."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated

import typer

from gpupool_cli import options, output
from gpupool_cli.diagnostics import say
from gpupool_cli.output import columns
from gpupoold.api.schemas_access import AddKeyRequest, KeyInfo, NewKey, SetKeyRequest
from gpupoold.api_keys import KeyPriority
from gpupoold.errors import UsageError
from gpupoold.units import format_duration, parse_duration_s

app = typer.Typer(
    no_args_is_help=True, help="API keys: access to the HTTP API, by model and with limits."
)

_DEFAULT_GRACE_S = 3600.0
_NEVER = "never"
_COLUMNS = columns("NAME, ID, MODELS, PRIORITY, LIMITS, REQUESTS>, TOKENS>, LAST-USED, EXPIRES")


def _grace_s(text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def expiry(text: str) -> float:
    """Wall-clock seconds of a date or of a time from now; 0 for never."""
    if text == _NEVER:
        return 0.0
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        pass
    try:
        return time.time() + parse_duration_s(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither a time from now such as 30d, nor a date such as 2030-01-31"
        ) from None


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key.")]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        parser=options.model_name,
        help="A model that the key may use; may be repeated.",
        autocompletion=options.complete_model_name,
    ),
]
PriorityOption = Annotated[
    str | None,
    typer.Option(
        "--priority",
        metavar="high|normal|low",
        help="Requests of low priority are refused first under overload.",
    ),
]
ExpiresOption = Annotated[
    float | None,
    typer.Option(
        "--expires",
        metavar="TIME|DATE",
        parser=expiry,
        help="Expiry: a time from now such as 30d, a date such as 2030-01-31, or never.",
    ),
]


RequestsOption = Annotated[
    int | None,
    typer.Option(
        "--requests-per-minute", metavar="N", min=0, help="Requests per minute; 0: any number."
    ),
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--tokens-per-minute",
        metavar="N",
        min=0,
        help="Tokens of prompts and answers per minute; 0: any number.",
    ),
]
LiveOption = Annotated[
    int | None,
    typer.Option("--max-live", metavar="N", min=0, help="Limit of live requests; 0: no limit."),
]


@app.command("add")
def add(
    ctx: typer.Context,
    name: NameArgument,
    model: ModelOption = None,
    metrics_only: Annotated[
        bool, typer.Option("--metrics-only", help="The key may only read /metrics.")
    ] = False,
    priority: PriorityOption = None,
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: TokensOption = None,
    max_live: LiveOption = None,
    expires: ExpiresOption = None,
    pace: options.PaceOption = None,
    on_fleet: Annotated[
        bool, typer.Option("--fleet", help="A key of all nodes of the fleet.")
    ] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Create a key and print the key, this once; by default for all models.

    Only a hash of the key is stored: a lost key must be replaced.
    """
    if model and metrics_only:
        raise UsageError("--model and --metrics-only exclude each other", "give one of the two")
    request = AddKeyRequest(
        name=name,
        models=() if metrics_only else tuple(model) if model else None,
        priority=_priority(priority) or "normal",
        requests_per_minute=requests_per_minute or None,
        tokens_per_minute=tokens_per_minute or None,
        max_live=max_live or None,
        expires_at=expires or None,
        pace=pace or "",
    )
    if on_fleet:
        from gpupoold.fleet import operations

        text = operations.add_key(options.socket_path_of(ctx), request)
        if as_json:
            output.print_json({"name": name, "text": text})
        else:
            output.print_line(text)
    else:
        with options.open_client(ctx) as client:
            new = client.add_key(request)
        _print_new(new, as_json)
    say("save the key now; it cannot be shown again")


@app.command("ls")
def ls(
    ctx: typer.Context,
    with_revoked: Annotated[bool, typer.Option("--all", help="Include removed keys.")] = False,
    as_json: options.JsonOption = False,
) -> None:
    """List the keys with their rights and use."""
    with options.open_client(ctx) as client:
        keys = client.api_keys(revoked=with_revoked)
    if as_json:
        output.print_json(keys)
        return
    output.print_table(_COLUMNS, [_row(key) for key in keys])
    if not keys:
        say("no keys yet: `gpupool key add NAME` creates a key")


@app.command("set")
def set_key(
    ctx: typer.Context,
    name: NameArgument,
    model: ModelOption = None,
    all_models: Annotated[
        bool, typer.Option("--all-models", help="Allow all models, including future models.")
    ] = False,
    priority: PriorityOption = None,
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: TokensOption = None,
    max_live: LiveOption = None,
    expires: ExpiresOption = None,
    pace: options.PaceOption = None,
) -> None:
    """Change a key's rights, from its next request on; the key itself stays.

    The given models replace the key's present models.
    """
    if model and all_models:
        raise UsageError("--model and --all-models exclude each other", "give one of the two")
    request = SetKeyRequest(
        models=tuple(model) if model else None,
        all_models=all_models,
        priority=_priority(priority),
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_live=max_live,
        expires_at=expires,
        pace=pace,
    )
    if request == SetKeyRequest():
        raise UsageError(f"no change given for the key {name!r}", "see `gpupool key set --help`")
    with options.open_client(ctx) as client:
        key = client.set_key(name, request)
    say(f"{key.name}: {_models(key)}, priority {key.priority}, {_limits(key) or 'no limits'}")


@app.command("rotate")
def rotate(
    ctx: typer.Context,
    name: NameArgument,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            metavar="DURATION",
            parser=_grace_s,
            help="Time for which the old key still works; default: 1h; 0 ends the old key now.",
        ),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Give a key a new secret and print the key, this once; its rights stay."""
    grace_s = _DEFAULT_GRACE_S if grace is None else grace
    with options.open_client(ctx) as client:
        new = client.rotate_key(name, grace_s)
    _print_new(new, as_json)
    until = new.key.previous_until
    if until is None:
        say("the old one works no more")
    else:
        say(
            f"the old one works until {output.time_text(until)} ({format_duration(grace_s)});"
            f" if the old key has leaked: `gpupool key rotate  {name} --grace 0`"
        )


@app.command("rm")
def rm(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of keys.")],
    on_fleet: Annotated[bool, typer.Option("--fleet", help="Keys of the fleet.")] = False,
) -> None:
    """Revoke keys at once; running answers continue to their end."""
    if on_fleet:
        from gpupoold.fleet import operations

        for name in names:
            operations.remove_key(options.socket_path_of(ctx), name)
            say(f"{name}: removed from all nodes within seconds")
        return
    with options.open_client(ctx) as client:
        for name in names:
            key = client.remove_key(name)
            say(f"{key.name}: removed; {key.num_requests} requests came with it")


def _print_new(new: NewKey, as_json: bool) -> None:
    if as_json:
        output.print_json(new)
    else:
        output.print_line(new.text)


def _priority(text: str | None) -> KeyPriority | None:
    match text:
        case None | "high" | "normal" | "low":
            return text
    raise UsageError(f"{text!r} is no priority", "give high, normal or low")


def _row(key: KeyInfo) -> list[str]:
    return [
        key.name,
        key.id,
        _models(key),
        key.priority,
        _limits(key) or output.NOTHING,
        str(key.num_requests),
        str(key.num_tokens),
        output.NOTHING if key.last_used_at is None else output.time_text(key.last_used_at),
        _end(key),
    ]


def _models(key: KeyInfo) -> str:
    if key.models is None:
        return "all models"
    return ",".join(key.models) or "metrics only"


def _limits(key: KeyInfo) -> str:
    limits = {
        "requests/min": key.requests_per_minute,
        "tokens/min": key.tokens_per_minute,
        "live": key.max_live,
    }
    shown = [f"{limit} {what}" for what, limit in limits.items() if limit is not None]
    return ", ".join([*shown, f"pace {key.pace}"] if key.pace else shown)


def _end(key: KeyInfo) -> str:
    if key.revoked_at is not None:
        return f"removed {output.time_text(key.revoked_at)}"
    if key.expires_at is None:
        return _NEVER
    has_expired = key.expires_at <= time.time()
    return f"{'expired ' if has_expired else ''}{output.time_text(key.expires_at)}"
