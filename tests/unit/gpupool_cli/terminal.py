"""The command line on a terminal of its own."""

from __future__ import annotations

import os
import pty
from collections.abc import Mapping
from typing import Literal

from tests.support.programs import start_command


def run_on_terminal(
    environment: Mapping[str, str], stream: Literal["stdout", "stderr"], *arguments: str
) -> tuple[int, str]:
    """Exit status, and what ``stream`` put on a terminal of 100 columns; the other goes nowhere."""
    # A bar needs a terminal whose cursor moves; on one whose cursor does not, text is plain.
    term = "dumb" if stream == "stdout" else "xterm"
    variables = {**environment, "COLUMNS": "100", "TERM": term, "NO_COLOR": "1"}
    return shown_on_terminal(variables, *arguments, streams=(stream,))


def shown_on_terminal(
    environment: Mapping[str, str], *arguments: str, streams: tuple[str, ...] = ("stdout", "stderr")
) -> tuple[int, str]:
    """Exit status, and what the streams put on a terminal; others go nowhere."""
    ours, theirs = pty.openpty()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    outputs = [theirs if name in streams else nowhere for name in ("stdout", "stderr")]
    command = start_command(arguments, environment, [theirs, *outputs])
    os.close(theirs)
    os.close(nowhere)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(ours)
    return command.wait(60), shown.decode()
