"""A test on a GPU that fails shows what the processes said, also of those that did not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.rig import Logs


def test_logs_are_shown_while_something_runs_and_once_if_it_did_not_start(tmp_path: Path) -> None:
    logs, path = Logs(), tmp_path / "one.log"
    path.write_text("why\n")
    with logs.watching(tmp_path):
        assert list(logs.tails()) == list(logs.tails()) == [("the end of one.log", "why")]
    assert not list(logs.tails())
    with pytest.raises(OSError, match="no start"), logs.watching(path):
        raise OSError("no start")
    assert list(logs.tails()) == [("the end of one.log", "why")]
    assert not list(logs.tails())
