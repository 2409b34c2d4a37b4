"""kill -9 while the state database is written, and while its schema is changed.

See :mod:`.kill_children` for what is checked after each kill: the database is sound, and every
change that was acknowledged is in it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

NUM_KILLS = 1000
NUM_UPGRADE_KILLS = 24


def kill(folder: Path, what: str, num_kills: int) -> dict[str, int]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    program = [sys.executable, "-m", "tests.unit.gpupool_state.kill_children"]
    done = subprocess.run(
        [*program, str(folder), what, str(num_kills), "7"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_acknowledged_changes_survive_a_thousand_kills(tmp_path: Path) -> None:
    found = kill(tmp_path, "changes", NUM_KILLS)
    assert found["kills"] == NUM_KILLS
    assert found["changes"] > NUM_KILLS
    assert found["flushes"] > NUM_KILLS / 4


def test_an_upgrade_that_is_killed_is_synthetic_for(tmp_path: Path) -> None:
    found = kill(tmp_path, "upgrade", NUM_UPGRADE_KILLS)
    assert found["kills"] == NUM_UPGRADE_KILLS
    # Some died while the copy was made, some during a step of the change, some after it.
    assert {re.sub("s+", "s", words) for words in found} == {"kills", "b", "bs", "bsd"}
