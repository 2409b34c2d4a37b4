"""``top``: the terminal UI, or one screen as text."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from gpupool_cli import output
from gpupool_cli.diagnostics import say
from gpupool_cli.options import SOCKET_VARIABLE, JsonOption, duration_s, open_client, socket_path_of
from gpupoold.errors import Refused, UsageError
from gpupoold.system.process import die_with_parent

_LEAST_INTERVAL_S = 0.2
_WEB_PORT = 8088


def top(
    ctx: typer.Context,
    once: Annotated[
        bool, typer.Option("-1", "--once", help="Print one screen as plain text and leave.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option(
            "--interval",
            "-d",
            metavar="DURATION",
            parser=duration_s,
            help="Time between two updates; default: 1s; the keys + and - change the time.",
        ),
    ] = None,
    theme: Annotated[
        str, typer.Option(metavar="NAME", help="dark, light, terminal, or a theme of Textual.")
    ] = "dark",
    use_ascii: Annotated[
        bool, typer.Option("--ascii", help="Draw with ASCII characters only.")
    ] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="Disable all actions.")] = False,
    web: Annotated[
        bool, typer.Option("--web", help="Serve the screen to a browser on this machine.")
    ] = False,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=1, max=65535, help="With --web: the TCP port.")
    ] = _WEB_PORT,
    as_json: JsonOption = False,
) -> None:
    """Watch devices, models, turns, requests and events live; ? shows the keys.

    Where stdout is no terminal, one screen is printed as with -1.
    """
    if as_json:
        with open_client(ctx) as client:
            output.print_json(client.top())
        return
    if web:
        _serve(socket_path_of(ctx), port, interval, theme, use_ascii=use_ascii, read_only=read_only)
        return
    if _is_in_browser():
        die_with_parent()  # without the server the application would wait for ever
    from gpupool_tui.run import Options, run, text_once  # slow to import

    options = Options(
        max(_LEAST_INTERVAL_S, interval or 1.0), theme, use_ascii or _is_ascii(), read_only
    )
    if once or not (_is_in_browser() or (sys.stdout.isatty() and sys.stdin.isatty())):
        columns = shutil.get_terminal_size((80, 24)).columns
        output.print_line(text_once(socket_path_of(ctx), columns, options))
        return
    run(socket_path_of(ctx), options)


def _serve(
    socket_path: Path,
    port: int,
    interval_s: float | None,
    theme: str,
    *,
    use_ascii: bool,
    read_only: bool,
) -> None:
    """Serve the application to a browser.

    Raises:
        UsageError: textual-serve is not installed.
        Refused: the port is taken.
    """
    try:
        from gpupool_tui.web import serve
    except ImportError as error:
        raise UsageError(
            f"--web needs the package textual-serve: {error}", "pip install 'gpupool[web]'"
        ) from error
    command = [f"{SOCKET_VARIABLE}={socket_path}", sys.executable, "-m", "gpupool_cli.start"]
    command += ["top", "--theme", theme]
    command += [] if interval_s is None else ["--interval", f"{interval_s:g}s"]
    command += ["--ascii"] if use_ascii else []
    command += ["--read-only"] if read_only else []
    try:
        serve(command, port, say)
    except OSError as error:
        raise Refused(f"cannot listen on port {port}: {error}", "choose another --port") from error


def _is_in_browser() -> bool:
    """Return whether textual-serve runs this process for a page."""
    return "TEXTUAL_DRIVER" in os.environ


def _is_ascii() -> bool:
    """Return whether the terminal is limited to ASCII, by its locale or its own statement."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return not encoding.startswith("utf") or os.environ.get("TERM") == "linux"
