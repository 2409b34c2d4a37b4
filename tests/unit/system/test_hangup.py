"""A closed terminal is reported from a reload."""

from __future__ import annotations

import os
import pty
from pathlib import Path

from gpupoold.service import hangup_handler


def test_a_terminal_that_is_closed() -> None:
    ours, theirs = pty.openpty()
    try:
        reported: list[str] = []
        handler = hangup_handler(
            theirs, lambda: reported.append("closed"), lambda: reported.append("reload")
        )
        handler()
        assert reported == ["reload"]
        os.close(ours)
        handler()
        assert reported == ["reload", "closed"]
    finally:
        os.close(theirs)


def test_without_a_terminal_it_is_a_reload(tmp_path: Path) -> None:
    reported: list[str] = []
    with (tmp_path / "log").open("w") as log:
        hangup_handler(
            log.fileno(), lambda: reported.append("closed"), lambda: reported.append("reload")
        )()
    assert reported == ["reload"]
