"""``add-adapter``: add a LoRA adapter to a model while the model serves."""

from __future__ import annotations

from typing import Annotated

import typer

from gpupool_cli.add_model import as_daemon_sees, follow
from gpupool_cli.diagnostics import say
from gpupool_cli.options import (
    BaseOption,
    NewNameArgument,
    RevisionOption,
    TbtOption,
    TtftOption,
)
from gpupool_cli.session import open_client
from gpupoold.api.schemas_models import AddAdapterRequest


def add_adapter(
    ctx: typer.Context,
    name: NewNameArgument,
    base: BaseOption,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|HF-ID", help="The adapter in peft's format; default: NAME is looked up."
        ),
    ] = None,
    revision: RevisionOption = None,
    ttft: TtftOption = None,
    tbt: TbtOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the adapter without adding the adapter.")
    ] = False,
) -> None:
    """Add a LoRA adapter: a further name of a model, whose weights are shared.

    The model serves meanwhile, and its answers go on. Without --ttft and --tbt the targets are the
    model's. `gpupool rm NAME` removes the adapter.
    """
    request = AddAdapterRequest(
        name=name,
        base=base,
        source=None if source is None else as_daemon_sees(source),
        revision=revision,
        ttft_s=ttft,
        tbt_s=tbt,
        check_only=check,
    )
    with open_client(ctx) as client:
        model = follow(name, client.add_adapter(request))
    assert model is not None
    if check:
        say(f"{name}: can be added to {model.name}; not added")
        return
    rank = next((one.rank for one in model.adapters if one.name == name), 0)
    say(f"{name}: an adapter of {model.name}, rank {rank}")
