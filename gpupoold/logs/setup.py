"""Set-up of the daemon's log: a file in ``paths.log_dir``, and standard error.

If standard error is systemd's journal, records go to the journal with fields. The file is written
in both cases: ``gpupool logs`` reads the file, and the daemon's user may be unable to read the
journal.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from gpupoold.config.schema import Settings
from gpupoold.errors import Failed
from gpupoold.event_kinds import EVENT_SUBJECTS, EventSubject
from gpupoold.logs.files import LogLimit, rotating_handler
from gpupoold.units import LineFormatter

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

JOURNAL_SOCKET = Path("/run/systemd/journal/socket")
STREAM_VARIABLE = "JOURNAL_STREAM"

_IDENTIFIER = "gpupoold"
_SEND_TIMEOUT_S = 1.0
_TOO_LARGE = (errno.EMSGSIZE, errno.ENOBUFS)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
# syslog(3)'s priorities of Python's levels.
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG_PRIORITY = 7
_SUBJECT_FIELDS = {EventSubject.MODEL: "GPUPOOL_MODEL", EventSubject.DEVICE: "GPUPOOL_DEVICE"}
_OTHER_FIELD = "GPUPOOL_SUBJECT"


def start_logging(settings: Settings) -> None:
    """Set the root logger up, once per process. Raises Failed: the log file cannot be written."""
    try:
        file = rotating_handler(settings.paths.log_dir / "gpupoold.log")
    except OSError as error:
        raise Failed(
            f"{settings.paths.log_dir}: cannot be written: {error.strerror}",
            "change paths.log_dir or its permissions",
        ) from error
    shown = shown_handler(sys.stderr, os.environ)
    limit = LogLimit()
    for handler in (file, shown):
        handler.addFilter(limit)
        if handler.formatter is None:
            handler.setFormatter(LineFormatter(_FORMAT))
    logging.basicConfig(level=settings.log.level.upper(), handlers=[file, shown])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def shown_handler(stream: TextIO, variables: Mapping[str, str]) -> logging.Handler:
    """Return a handler for the journal if ``stream`` is connected to the journal, else for
    ``stream``.
    """
    if not is_journal(stream.fileno(), variables):
        return logging.StreamHandler(stream)
    handler = JournalHandler()
    handler.setFormatter(LineFormatter())  # the time and level are in fields
    return handler


def is_journal(fd: int, variables: Mapping[str, str]) -> bool:
    """Return whether a descriptor is connected to the journal.

    ``$JOURNAL_STREAM`` has the device and inode of the journal's stream.
    """
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return variables.get(STREAM_VARIABLE) == f"{status.st_dev}:{status.st_ino}"


def encode(fields: Mapping[str, str]) -> bytes:
    """Return a datagram for the journal."""
    parts = []
    for name, value in fields.items():
        data = value.encode(errors="surrogateescape")
        if b"\n" in data:
            parts.append(name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n")
        else:
            parts.append(name.encode() + b"=" + data + b"\n")
    return b"".join(parts)


class JournalHandler(logging.Handler):
    """A handler that sends records to the journal, or to standard error if sending fails.

    A record of an event (``extra`` with ``event_kind`` and ``event_subject``) gets the fields
    ``GPUPOOL_EVENT``, and ``GPUPOOL_MODEL``, ``GPUPOOL_DEVICE`` or ``GPUPOOL_SUBJECT``.

    A datagram has a field per line, ``NAME=value``; a value with several lines is preceded by its
    length (https://systemd.io/JOURNAL_NATIVE_PROTOCOL). A record too large for a datagram is sent
    in a sealed memfd.
    """

    def __init__(self, path: Path = JOURNAL_SOCKET) -> None:
        super().__init__()
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(_SEND_TIMEOUT_S)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = encode(self._fields(record))
            try:
                self._send(data)
            except OSError:
                print(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        self._socket.close()
        super().close()

    def _fields(self, record: logging.LogRecord) -> dict[str, str]:
        fields = {
            "MESSAGE": self.format(record),
            "PRIORITY": str(_priority(record.levelno)),
            "SYSLOG_IDENTIFIER": _IDENTIFIER,
            "LOGGER": record.name,
            "CODE_FILE": record.pathname,
            "CODE_LINE": str(record.lineno),
            "CODE_FUNC": record.funcName,
        }
        return fields | _event_fields(record)

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendto(data, self._path)
        except OSError as error:
            if error.errno not in _TOO_LARGE:
                raise
            self._send_memfd(data)

    def _send_memfd(self, data: bytes) -> None:
        fd = os.memfd_create("gpupool-journal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(fd, "wb", buffering=0) as file:
            file.write(data)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
            self._socket.sendmsg([], rights, 0, self._path)


def _event_fields(record: logging.LogRecord) -> dict[str, str]:
    kind = getattr(record, "event_kind", None)
    subject = getattr(record, "event_subject", None)
    if not isinstance(kind, str) or not isinstance(subject, str):
        return {}
    subject_kind = EVENT_SUBJECTS.get(kind, EventSubject.DAEMON)
    return {"GPUPOOL_EVENT": kind, _SUBJECT_FIELDS.get(subject_kind, _OTHER_FIELD): subject}


def _priority(level: int) -> int:
    return next((found for least, found in _PRIORITIES if level >= least), _DEBUG_PRIORITY)
