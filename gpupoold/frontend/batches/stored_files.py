"""Contents of files on disk, each under its id, readable by the daemon's user only."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

_PARTIAL = ".partial"
_PIECE_BYTES = 1 << 20
# Longer than any upload.
_UPLOAD_S = 3600.0


class NewFile:
    """A file being written, which nobody sees before :meth:`keep`."""

    def __init__(self, folder: Path) -> None:
        self.id = new_id("file-")
        self.num_bytes = 0
        self._path = folder / self.id
        self._partial = folder / (self.id + _PARTIAL)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._partial, flags, 0o600), "wb")

    def copy(self, content: BinaryIO) -> None:
        """Append a content."""
        while piece := content.read(_PIECE_BYTES):
            self.num_bytes += self._file.write(piece)

    def write_lines(self, lines: Iterable[bytes]) -> None:
        """Append lines."""
        for line in lines:
            self.num_bytes += self._file.write(line + b"\n")

    def keep(self) -> None:
        """Close the file; the content is on disk when the method returns."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._partial.rename(self._path)

    def discard(self) -> None:
        """Remove the file."""
        self._file.close()
        self._partial.unlink(missing_ok=True)


class StoredFiles:
    """The folder of files. Blocking; raises OSError if the disk fails."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content. ``file_id`` must be of the database."""
        return self._folder / file_id

    def begin(self) -> NewFile:
        """Begin a file."""
        return NewFile(self._folder)

    def save(self, content: BinaryIO) -> NewFile:
        """Copy a content to disk; return the kept file."""
        file = self.begin()
        try:
            file.copy(content)
            file.keep()
        except BaseException:
            file.discard()
            raise
        return file

    def remove(self, file_id: str) -> None:
        """Remove a content, if it is there."""
        self.path(file_id).unlink(missing_ok=True)

    def remove_unknown(self, known: set[str]) -> None:
        """Remove old contents that no row of the database has: of uploads cut off by a crash."""
        for path in self._folder.glob("file-*"):
            is_old = time.time() - path.stat().st_mtime > _UPLOAD_S
            if is_old and path.name not in known:
                path.unlink(missing_ok=True)


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess."""
    return prefix + secrets.token_hex(16)
