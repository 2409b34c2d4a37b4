"""A closed terminal is told from a reload."""

from __future__ import annotations

import os
import pty
from pathlib import Path

from gpupoold.system.hangup import hangup_handler


def test_a_terminal_that_is_closed() -> None:
    ours, theirs = pty.openpty()
    try:
        told: list[str] = []
        handler = hangup_handler(
            theirs, lambda: told.append("closed"), lambda: told.append("reload")
        )
        handler()
        assert told == ["reload"]
        os.close(ours)
        handler()
        assert told == ["reload", "closed"]
    finally:
        os.close(theirs)


def test_without_a_terminal_it_is_a_reload(tmp_path: Path) -> None:
    told: list[str] = []
    with (tmp_path / "log").open("w") as log:
        hangup_handler(log.fileno(), lambda: told.append("closed"), lambda: told.append("reload"))()
    assert told == ["reload"]
