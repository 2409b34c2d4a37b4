"""``key``: what is typed, before any daemon is asked."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

import pytest
import typer

from gpupool_cli.keys import expiry
from tests.unit.gpupool_cli.conftest import Cli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


def test_expiry_is_a_time_from_now_or_a_date() -> None:
    assert expiry("30d") == pytest.approx(time.time() + 30 * 86400, abs=60)
    assert expiry("2090-01-31") == datetime(2090, 1, 31).timestamp()
    assert expiry("2090-01-31T12:30:00+00:00") == pytest.approx(3_789_635_400.0, abs=86400)
    assert expiry("never") == 0
    tomorrow = datetime.now() + timedelta(days=1)
    assert expiry(tomorrow.isoformat()) == pytest.approx(tomorrow.timestamp())


@pytest.mark.parametrize("text", ["soon", "30 parsecs", "2090-13-01", ""])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="neither a time from now"):
        expiry(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add", "web", "--priority", "top"], "'top' is no priority"),
        (["add", "web", "--model", "m", "--metrics-only"], "exclude each other"),
        (["set", "web", "--model", "m", "--all-models"], "exclude each other"),
        (["set", "web"], "no change given"),
        (["add", "web", "--max-live", "-1"], "--max-live"),
        (["rotate", "web", "--grace", "later"], "--grace"),
    ],
)
def test_usage_errors(daemon: FakeDaemon, cli: Cli, arguments: list[str], message: str) -> None:
    done = cli("key", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
