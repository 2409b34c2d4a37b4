"""The log files of all processes as one stream of lines, for ``gpupool logs``."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from gpupoold.api.schemas import LogLine
from gpupoold.logs.files import old_file

_POLL_S = 0.25
_MAX_TAIL_BYTES = 8 << 20


async def follow_logs(
    paths: dict[str, Path],
    num_lines: int,
    *,
    follow: bool,
    is_gone: Callable[[], Awaitable[bool]],
) -> AsyncIterator[str]:
    """Yield NDJSON of :class:`LogLine`: the last lines of each log, then new lines."""
    with contextlib.ExitStack() as stack:
        readers = {name: stack.enter_context(LogReader(path)) for name, path in paths.items()}
        for name, reader in readers.items():
            for line in await asyncio.to_thread(reader.tail, num_lines):
                yield _encode(name, line)
        while follow and not await is_gone():
            await asyncio.sleep(_POLL_S)
            for name, reader in readers.items():
                for line in await asyncio.to_thread(reader.new_lines):
                    yield _encode(name, line)


class LogReader:
    """A reader that starts at the end of a log and continues in the next file after a rotation."""

    def __init__(self, path: Path) -> None:
        """Open the log.

        Raises:
            OSError: the file cannot be read.
        """
        self._path = path
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def tail(self, num_lines: int) -> list[str]:
        """Return the last ``num_lines`` lines before the start of :meth:`new_lines`."""
        end = self._file.tell()
        start = max(0, end - _MAX_TAIL_BYTES)
        self._file.seek(start)
        lines = _lines(self._file.read(end - start))
        if len(lines) < num_lines and start == 0 and not self._has_next():
            with contextlib.suppress(OSError), old_file(self._path, 1).open("rb") as older:
                older.seek(max(0, older.seek(0, os.SEEK_END) - _MAX_TAIL_BYTES))
                lines = _lines(older.read()) + lines
        return lines[len(lines) - num_lines :] if num_lines < len(lines) else lines

    def new_lines(self) -> list[str]:
        """Return the complete lines written since the last call.

        A truncated log starts anew. After a rotation the rest of the old file comes first.
        """
        has_next = self._has_next()  # before the old file is read to its end
        offset = self._file.tell()
        if os.fstat(self._file.fileno()).st_size < offset:
            offset = self._file.seek(0)
        data = self._file.read(_MAX_TAIL_BYTES)
        if has_next and len(data) < _MAX_TAIL_BYTES:
            with contextlib.suppress(FileNotFoundError):  # the next file does not exist yet
                following = self._path.open("rb")
                self._file.close()
                self._file = following
                return _lines(data)
        whole = data.rfind(b"\n") + 1
        self._file.seek(offset + whole)
        return _lines(data[:whole])

    def _has_next(self) -> bool:
        try:
            there, here = self._path.stat(), os.fstat(self._file.fileno())
        except FileNotFoundError:  # not created yet
            return False
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)


def _lines(data: bytes) -> list[str]:
    return data.decode(errors="replace").splitlines()


def _encode(name: str, line: str) -> str:
    return LogLine(process=name, line=line).model_dump_json() + "\n"
