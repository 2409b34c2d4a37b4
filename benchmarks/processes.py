"""The processes of a daemon under test."""

from __future__ import annotations

import psutil

from gpupool_cli.private_daemon import PrivateDaemon


def processes(daemon: PrivateDaemon) -> list[psutil.Process]:
    """Return the daemon's process, first, and all that descend from it."""
    root = psutil.Process(daemon.process.pid)
    return [root, *root.children(recursive=True)]
