"""``batches``: which are shown, and why one stands still."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from gpupool_cli import output
from gpupoold.api.schemas import BatchInfo
from tests.unit.gpupool_cli.conftest import Cli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon

WAITS = BatchInfo(
    id="batch_1",
    key="team",
    models=["bad", "good"],
    endpoint="/v1/completions",
    state="in_progress",
    num_requests=100,
    num_completed=7,
    num_failed=1,
    reason="The model `bad` is failed:\nno weights",
    created_at=1_750_000_000,
    expires_at=1_750_086_400,
    next_try_at=1_750_000_300,
    ended_at=None,
)
NEW = replace(WAITS, id="batch_2", key="", models=[], state="validating", reason="")


def test_a_table(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.batches = [WAITS, NEW]
    lines = cli("batches").stdout.splitlines()
    assert lines[0].split() == [
        *("BATCH", "KEY", "MODELS", "STATE", "REQUESTS", "ANSWERED", "FAILED"),
        *("ADDED", "WAITS-BECAUSE"),
    ]
    added = output.time_text(1_750_000_000).split()
    assert lines[1].split() == [
        *("batch_1", "team", "bad,good", "in_progress", "100", "7", "1", *added),
        *("The", "model", "`bad`", "is", "failed:", "no", "weights"),
    ]
    assert lines[2].split() == [*("batch_2", "-", "-", "validating", "100", "7", "1", *added, "-")]
    assert daemon.queries == [{"limit": "100", "ended": "false"}]


def test_json(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.batches = [WAITS]
    found = json.loads(cli("batches", "--json", "--all", "-n", "3").stdout)
    assert found == [asdict(WAITS)]
    assert daemon.queries == [{"limit": "3", "ended": "true"}]


def test_none(daemon: FakeDaemon, cli: Cli) -> None:
    assert daemon.batches == []
    assert "no batches under way" in cli("batches").stderr
