"""The second part of `make demo`: a killed worker interrupts answers, which the demo recognises."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo import act_two
from tests.functional.daemon_tools import sim_daemon

MODELS = ("one", "two")
NUM_TOKENS = 80
CONFIG = """
devices = ["sim:2xA10"]

[memory]
model_cache = 0
"""


@pytest.mark.slow
def test_the_kill_hits_answers_that_continue_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(act_two, "NUM_TOKENS", NUM_TOKENS)
    monkeypatch.setattr(act_two, "KILL_AFTER_TOKENS", act_two.NUM_REQUESTS * NUM_TOKENS // 4)
    printed = io.StringIO()
    console = Console(file=printed, width=100)
    with sim_daemon(CONFIG, tmp_path, MODELS, ttft_s=8.0, tbt_s=0.2) as daemon:
        found = asyncio.run(act_two.play(console, daemon, list(MODELS)))
        hit = found["hit"]
        assert hit
        assert found["answers"][act_two.ON_KILLED]["requests"] == len(hit)
        assert found["completed"] == act_two.NUM_REQUESTS
        with daemon.client() as client:
            whys = [client.why(stream_id).finished for stream_id in hit]
    killed = found["killed_device"]
    assert all(why is not None and why.device is not None for why in whys)
    assert re.search(rf"device {killed} → {1 - killed}\b", printed.getvalue())
