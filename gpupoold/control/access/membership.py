"""The secret that the daemon shares with its fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from gpupool_state import History
from gpupoold.access.fleet import is_secret
from gpupoold.errors import Failed
from gpupoold.system import durable
from gpupoold.wire import messages as m

SECRET_FILE = "fleet-secret"


class FleetMembership:
    """The secret of the daemon's fleet, in a file of the state folder.

    The frontends are informed of each change.
    """

    def __init__(
        self, folder: Path, downloads: Path, history: History, send: Callable[[m.Message], None]
    ) -> None:
        """``downloads`` has checkpoints for other nodes; ``send`` reaches all frontends."""
        self._folder = folder
        self._downloads = downloads
        self._history = history
        self._send = send
        self.secret = read_secret(folder)

    async def set(self, secret: str) -> None:
        """Take a secret over, or leave the fleet if it is empty.

        Raises:
            Failed: the secret cannot be stored; nothing has changed.
        """
        await asyncio.to_thread(write_secret, self._folder, secret)
        is_new, self.secret = secret != self.secret, secret
        if is_new:
            text = "takes requests of a fleet's entrance" if secret else "is in no fleet any more"
            self._history.record_event("info", "fleet_changed", "gpupoold", text)
        self.publish()

    def publish(self) -> None:
        """Send the secret to the frontends."""
        self._send(m.FleetSecret(self.secret, str(self._downloads)))


def read_secret(folder: Path) -> str:
    """Return the secret of a daemon's fleet, empty without one.

    Raises:
        Failed: the file cannot be read, or has no secret.
    """
    path = folder / SECRET_FILE
    try:
        text = path.read_text("utf-8").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise Failed(f"{path} cannot be read: {error}") from error
    if not is_secret(text):
        raise Failed(f"{path} is not the secret of a fleet", "remove the file, and join again")
    return text


def write_secret(folder: Path, secret: str) -> None:
    """Store the secret, readable by the daemon's user alone; an empty secret removes the file."""
    path = folder / SECRET_FILE
    try:
        if secret:
            durable.write_private(path, f"{secret}\n")
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise Failed(f"{path} cannot be written: {error}") from error
