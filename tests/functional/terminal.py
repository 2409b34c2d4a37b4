"""``gpupool top`` on a terminal of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import child_env, until

ESCAPES = re.compile(r"\x1b(?:\[[0-9;?<>=]*[ -/]*[@-~]|\][^\x07]*\x07|[=>()][0-9A-B]?)")


class Terminal:
    """``gpupool top`` on a terminal of its own; what it has drawn, without its escapes."""

    def __init__(self, daemon: PrivateDaemon, *options: str, columns: int = 100) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpupool_cli.main", "top", "-d", "200ms", *options],
            env=child_env() | {"GPUPOOL_SOCKET": str(daemon.socket_path), "TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.raw = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(20)
        self._reader.join(20)
        os.close(self._ours)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
            while piece := os.read(self._ours, 1 << 16):
                self.raw += piece.decode(errors="replace")

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def since(self, mark: int) -> str:
        """What was drawn since so many characters."""
        return ESCAPES.sub("", self.raw[mark:])

    def until(self, text: str, mark: int = 0) -> None:
        until(lambda: text in self.since(mark), 30)
