"""The only writer of stderr, and exit statuses, which scripts rely on."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import typer
from typer.core import TyperGroup

from gpupoold.errors import GpupoolError
from gpupoold.units import plain_problem, without_controls


def say(text: str) -> None:
    """Print a message for people, not data."""
    print(without_controls(text), file=sys.stderr, flush=True)


def report(error: GpupoolError) -> ExitCode:
    _print_error(error.message, error.hint)
    return ExitCode(error.exit_code)


class CliGroup(TyperGroup):
    """The root command: turns every failure into a message and an exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: object,
    ) -> object:
        """Run the command line; leaves by ``SystemExit`` unless ``standalone_mode`` is off."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        try:
            # Not standalone: usage errors are raised instead of printed.
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except GpupoolError as error:
            sys.exit(report(error))
        except typer.TyperException as error:
            sys.exit(_report_usage(error))
        except typer.Abort:
            _print_error("aborted", "")
            sys.exit(ExitCode.FAILED)
        sys.exit(code if isinstance(code, int) else ExitCode.OK)

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command; end quietly if the reader has gone away."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_stdout()
            raise typer.Exit(ExitCode.OK) from None
        return result


def _report_usage(error: typer.TyperException) -> int:
    message = plain_problem(error.format_message())
    if message.startswith("Usage:"):  # a group called without a command shows its help
        say(message)
    else:
        ctx = getattr(error, "ctx", None)
        _print_error(message, f"see `{ctx.command_path} --help`" if ctx is not None else "")
    return error.exit_code


def _print_error(message: str, hint: str) -> None:
    say(f"error: {message}")
    if hint:
        say(f"hint: {hint}")


def _discard_stdout() -> None:
    """Without this the interpreter's own flush at exit would complain about the pipe."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class ExitCode(IntEnum):
    """Exit statuses of ``gpupool``; those of errors equal ``GpupoolError.exit_code``."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DAEMON_NOT_RUNNING = 3
    NO_SUCH_MODEL = 4
    REFUSED = 5
    TIMED_OUT = 6
    INTERRUPTED = 130
