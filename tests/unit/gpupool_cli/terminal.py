"""The command line on a terminal of its own."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Mapping
from typing import Literal

from tests.unit.gpupool_cli.conftest import command


def run_on_terminal(
    environment: Mapping[str, str], stream: Literal["stdout", "stderr"], *arguments: str
) -> tuple[int, str]:
    """Exit status, and what ``stream`` put on a terminal of 100 columns; the other goes nowhere."""
    # A bar needs a terminal whose cursor moves; on one whose cursor does not, text is plain.
    term = "dumb" if stream == "stdout" else "xterm"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(*arguments),
        env={**environment, "COLUMNS": "100", "TERM": term, "NO_COLOR": "1"},
        stdin=theirs,
        stdout=theirs if stream == "stdout" else subprocess.DEVNULL,
        stderr=theirs if stream == "stderr" else subprocess.DEVNULL,
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(ours)
    return process.wait(60), shown.decode()
