"""Changes of keys and models are on the disk once they are acknowledged; the history need not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO

from gpupool_state import DATABASE_NAME, ApiKeys, Database, Registry
from tests.power_cut import PowerCut

ROOT = Path(__file__).parents[3]


class Steps:
    """The steps of the child, and what a power cut after each of them leaves."""

    def __init__(self, folder: Path, said: IO[str], go_on: IO[str], cut: PowerCut) -> None:
        self._folder = folder
        self._said = said
        self._go_on = go_on
        self._cut = cut

    async def until(self, step: str) -> tuple[list[str], list[str], int]:
        """Names of keys and models, and the number of events."""
        while (said := self._said.readline().strip()) != step:
            assert said, "the child has ended"
            self._go_on.write("\n")
            self._go_on.flush()
        left = self._cut.leave(self._folder / step)
        self._go_on.write("\n")
        self._go_on.flush()
        async with await Database.open(left / DATABASE_NAME) as db:
            keys = [key.name for key in await ApiKeys(db).list()]
            models = [model.spec.name for model in await Registry(db).list()]
            [row] = await db.fetch_all("SELECT count(*) AS num FROM events")
            return keys, [str(name) for name in models], int(row["num"])


async def test_what_was_acknowledged_survives_a_power_cut(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    cut = PowerCut(state, tmp_path)
    command = [sys.executable, "-m", "tests.unit.gpupool_state.power_cut_child"]
    with subprocess.Popen(
        [*command, str(state / DATABASE_NAME)],
        cwd=ROOT,
        env=cut.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        steps = Steps(tmp_path, child.stdout, child.stdin, cut)
        assert await steps.until("key added") == (["ada"], [], 0)
        assert await steps.until("model added") == (["ada"], ["llama"], 0)
        num_syncs = cut.num_syncs
        keys, models, _ = await steps.until("history written")
        assert (keys, models) == (["ada"], ["llama"])
        assert cut.num_syncs - num_syncs < 5  # 40 transactions: the history does not wait
        keys, models, num_events = await steps.until("key revoked")
        assert (keys, models) == ([], ["llama"])
        assert num_events == 20  # what came before a durable change is as durable
    assert child.returncode == 0
