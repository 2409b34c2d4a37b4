"""``gpupool unload`` and ``gpupool cancel``."""

from __future__ import annotations

from tests.unit.gpupool_cli import samples
from tests.unit.gpupool_cli.conftest import Cli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


def test_unload_says_what_it_freed(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("q", aliases=("chat",))
    result = cli("unload", "chat")
    assert result.exit_code == 0
    assert result.stderr == "q: freed 15 GiB on devices, 15 GiB of host memory\n"
    assert daemon.unloads == [("q", "refuse", False)]


def test_unload_with_live_requests_has_to_be_told(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("q")
    daemon.live["q"] = 1
    result = cli("unload", "q")
    assert result.exit_code == 5
    assert "--drain or --force" in result.stderr
    assert cli("unload", "q", "--drain").exit_code == 0
    assert cli("unload", "q", "--force", "--keep-host").exit_code == 0
    assert daemon.unloads == [("q", "drain", False), ("q", "force", True)]
    assert cli("unload", "q", "--drain", "--force").exit_code == 2
    assert cli("unload", "nobody").exit_code == 4


def test_cancel(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.live_requests = [samples.live_request("cmpl-1", "q")]
    result = cli("cancel", "cmpl-1")
    assert result.exit_code == 0
    assert result.stderr == "cmpl-1: cancelled after 20 tokens of q\n"
    daemon.live_requests = [samples.live_request(f"{n}_ab", "q") for n in range(3)]
    assert cli("cancel", "0_ab").stderr == "0_ab: cancelled after 20 tokens of q\n"
    result = cli("cancel", "cmpl-1")
    assert result.exit_code == 4
    assert "cmpl-1" in result.stderr
