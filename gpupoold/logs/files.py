"""Log files of bounded size, for the daemon and its children.

A full file is renamed ``NAME.log.1``, the previous ``NAME.log.1`` becomes ``NAME.log.2``, and so
on; the oldest file is deleted. Each process has at most ``MAX_LOG_BYTES`` of logs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import struct
import termios
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

_logger = logging.getLogger(__name__)

FILE_BYTES = 16 << 20
NUM_OLD_FILES = 3
MAX_LOG_BYTES = FILE_BYTES * (1 + NUM_OLD_FILES)

# The kernel's limit for an unprivileged user. The larger a pipe, the less often a writing child
# waits for the daemon.
_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 18

WINDOW_S = 60.0
MAX_TRACEBACKS = 5
MAX_RECORDS = 300
MAX_TEXT_CHARS = 16_384


def old_file(path: Path, number: int) -> Path:
    """Return the name of a log's file after ``number`` rotations."""
    return path.with_name(f"{path.name}.{number}")


class _PrivateHandler(RotatingFileHandler):
    """A handler whose files only the daemon's user can read."""

    def _open(self) -> TextIOWrapper:
        os.close(_open_log(self.baseFilename))
        return super()._open()


def rotating_handler(path: Path) -> logging.Handler:
    """Return a handler that writes records to a file of bounded size."""
    return _PrivateHandler(path, maxBytes=FILE_BYTES, backupCount=NUM_OLD_FILES)


def _open_log(path: str | Path) -> int:
    """Open a log for appending; an existing log becomes private too."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # another user's file
        os.fchmod(fd, 0o600)
    return fd


class RotatingFile:
    """A file for appending that never exceeds ``file_bytes``."""

    def __init__(self, path: Path, file_bytes: int = FILE_BYTES) -> None:
        self._path = path
        self._file_bytes = file_bytes
        self._fd = _open_log(self._path)

    def write(self, data: bytes) -> None:
        """Append; begin a new file when the file is full, if possible not within a line.

        Raises OSError: the disk is full or the folder cannot be written. The rest of ``data`` is
        lost; a later call tries again.
        """
        view = memoryview(data)
        while view:
            held_bytes = os.fstat(self._fd).st_size
            piece = view[: max(0, self._file_bytes - held_bytes)]
            if len(piece) < len(view):
                piece = piece[: bytes(piece).rfind(b"\n") + 1] or piece
                if held_bytes and not bytes(piece).endswith(b"\n"):
                    self._rotate()
                    continue
            view = view[os.write(self._fd, piece) :]

    def close(self) -> None:
        os.close(self._fd)

    def _rotate(self) -> None:
        for number in range(NUM_OLD_FILES, 0, -1):
            younger = old_file(self._path, number - 1) if number > 1 else self._path
            with contextlib.suppress(FileNotFoundError):
                os.replace(younger, old_file(self._path, number))
        fresh = _open_log(self._path)
        os.close(self._fd)
        self._fd = fresh


class LogPipe:
    """A pipe to a log file: a thread appends the child's output from ``write_fd`` to the file.

    The child never waits for the event loop. At most ``MAX_LOG_BYTES`` are kept, at any rate of
    output. Output still in the pipe when the child dies is kept too.
    """

    def __init__(self, path: Path, file_bytes: int = FILE_BYTES) -> None:
        """Open the file and start the thread.

        Raises OSError: the file cannot be written, or there are no descriptors or threads left.
        """
        self._path = path
        self._is_failing = False
        self._finished: Future[None] = Future()
        thread = threading.Thread(target=self._copy, name=f"log-{path.stem}", daemon=True)
        with contextlib.ExitStack() as undo:
            self._file = RotatingFile(path, file_bytes)
            undo.callback(self._file.close)
            self._read_fd, self.write_fd = os.pipe()
            undo.callback(os.close, self._read_fd)
            undo.callback(os.close, self.write_fd)
            self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
            undo.callback(os.close, self._stop_fd)
            with contextlib.suppress(OSError):  # the limit of the user's pipes is reached
                fcntl.fcntl(self.write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            try:
                thread.start()
            except RuntimeError as error:
                raise OSError(errno.EAGAIN, f"no thread for {path}: {error}") from error
            undo.pop_all()

    def close_writing(self) -> None:
        """Close the daemon's copy of the writing end, after the child has its own copy."""
        os.close(self.write_fd)

    def finish(self) -> Future[None]:
        """Write the pipe's content and close all descriptors; return a future for the end.

        To be called once, after the child's end. A process that the child has left behind gets
        SIGPIPE on its next write.
        """
        os.eventfd_write(self._stop_fd, 1)
        self._finished.add_done_callback(lambda _: os.close(self._stop_fd))
        return self._finished

    def _copy(self) -> None:
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        poll.register(self._stop_fd, select.POLLIN)
        try:
            while True:
                ready = {fd for fd, _ in poll.poll()}
                if self._stop_fd in ready:
                    self._copy_the_rest()
                    return
                if not self._copy_some(_READ_BYTES):
                    return
        finally:
            os.close(self._read_fd)
            self._file.close()
            self._finished.set_result(None)

    def _copy_the_rest(self) -> None:
        packed = fcntl.ioctl(self._read_fd, termios.FIONREAD, bytes(4))
        num_bytes: int = struct.unpack("i", packed)[0]
        while num_bytes > 0:
            num_bytes -= self._copy_some(min(num_bytes, _READ_BYTES))

    def _copy_some(self, max_bytes: int) -> int:
        """Return the number of bytes copied, 0 if all writers have closed the pipe."""
        data = os.read(self._read_fd, max_bytes)
        try:
            self._file.write(data)
            self._is_failing = False
        except OSError as error:  # the child continues; its output is lost
            if not self._is_failing:
                _logger.warning("cannot write %s, so log lines are lost: %s", self._path, error)
            self._is_failing = True
        return len(data)


@dataclass(slots=True)
class _Place:
    """Counts of one line of code in the present window; ``began_at`` in seconds of the clock."""

    began_at: float
    num_tracebacks: int = 0
    num_records: int = 0
    num_dropped: int = 0


class LogLimit(logging.Filter):
    """A filter that drops records of a line of code (a *place*) that has logged too many.

    Per minute and place, ``MAX_TRACEBACKS`` records with a traceback and ``MAX_RECORDS`` other
    records pass; the next record to pass states the number of dropped records. Debug records are
    not counted. A message or traceback above ``MAX_TEXT_CHARS`` characters loses its middle. All
    handlers of a process share one filter, which counts a record once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int], _Place] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        verdict = getattr(record, "gpupool_passes", None)
        if verdict is None:
            verdict = self._passes(record)
            record.gpupool_passes = verdict
            if verdict:
                _shorten(record)
        return bool(verdict)

    def _passes(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return True
        now_s = self._clock()
        key = (record.name, record.lineno)
        with self._lock:
            place = self._places.get(key)
            num_dropped = 0
            if place is None or now_s - place.began_at >= WINDOW_S:
                num_dropped = place.num_dropped if place is not None else 0
                place = self._places[key] = _Place(now_s)
            if record.exc_info:
                place.num_tracebacks += 1
                passes = place.num_tracebacks <= MAX_TRACEBACKS
            else:
                place.num_records += 1
                passes = place.num_records <= MAX_RECORDS
            place.num_dropped += not passes
        if num_dropped:
            record.msg = f"{record.msg} ({num_dropped} more from here were not logged)"
        return passes


def _shorten(record: logging.LogRecord) -> None:
    try:
        text = record.getMessage()
        if len(text) > MAX_TEXT_CHARS:
            record.msg, record.args = _without_middle(text), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = _without_middle(logging.Formatter().formatException(record.exc_info))
    except Exception:  # as in handlers, a bad record must not raise
        record.msg, record.args = f"a record of {record.name} that cannot be formatted", ()


def _without_middle(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
