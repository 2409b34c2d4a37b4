"""Processes of tests share one import of vLLM, unless they would import something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional.daemon_tools import child, emulated_config, private_daemon, until
from tests.functional.worker_peer import WorkerPeer

FORKED = "forked by the tests' import server"


def log_of(folder: Path) -> str:
    config = emulated_config(64 << 20)
    with private_daemon(config, folder) as daemon:
        process = child(daemon, "system.fork_server")
    until(lambda: not process.is_running())
    (log,) = folder.rglob("fork-server.log")
    return log.read_text()


def test_a_fork_ends_with_its_daemon(tmp_path: Path) -> None:
    assert FORKED in log_of(tmp_path)


def test_a_worker_without_a_daemon_is_forked(tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    peer = WorkerPeer(64 << 20, log_path=log_path)
    peer.close()
    assert FORKED in log_path.read_text()


@pytest.mark.slow
def test_another_path_means_another_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert FORKED not in log_of(tmp_path / "daemon")
