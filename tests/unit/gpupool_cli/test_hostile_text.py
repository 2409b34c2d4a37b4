"""What clients have sent reaches a terminal through the command line without control characters."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.unit.gpupool_cli.conftest import Cli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon
from tests.unit.gpupool_cli.test_history import RECORD

# Escape, clipboard, bell, C1's control sequence introducer, DEL, and a line of its own.
HOSTILE = "x\x1b]52;c;ZXZpbA==\x07\x9b2J\x7f\nready"


def is_harmless(text: str) -> bool:
    return all(one == "\n" or (one >= " " and not "\x7f" <= one <= "\x9f") for one in text)


def test_tables_and_json(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.history = [replace(RECORD, request_id=HOSTILE, error=HOSTILE)]
    table = cli("history", "--requests").stdout
    assert len(table.splitlines()) == 2
    assert is_harmless(table)
    shown = cli("history", "--requests", "--json").stdout
    assert is_harmless(shown)
    assert json.loads(shown)[0]["request_id"] == HOSTILE


def test_errors(cli: Cli) -> None:
    refused = cli("show", HOSTILE)
    assert refused.exit_code != 0
    assert is_harmless(refused.stdout + refused.stderr)
