"""Files of batches: contents on disk, and the lines of input files.

Each content is stored under its id, readable by the daemon's user only. A line of an input file has
one request of OpenAI's protocol. Blocking.
"""

from __future__ import annotations

import os
import secrets
import time
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

_PARTIAL = ".partial"
_PIECE_BYTES = 1 << 20
# Longer than any upload.
_UPLOAD_S = 3600.0

ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
MAX_ERRORS = 50
MAX_LINE_BYTES = 16 << 20
_MAX_ID_CHARS = 512


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
        while piece := content.read(_PIECE_BYTES):
            self.num_bytes += self._file.write(piece)

    def write_lines(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.num_bytes += self._file.write(line + b"\n")

    def keep(self) -> None:
        """Close the file; the content is on disk when the method returns."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._partial.rename(self._path)

    def discard(self) -> None:
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
        return NewFile(self._folder)

    def save(self, content: BinaryIO) -> NewFile:
        file = self.begin()
        try:
            file.copy(content)
            file.keep()
        except BaseException:
            file.discard()
            raise
        return file

    def remove(self, file_id: str) -> None:
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


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    model: str
    stream: Any = None


class BatchLine(NamedTuple):
    """A request for a model; ``body`` is JSON as the client wrote it."""

    custom_id: str
    url: str
    model: str
    body: bytes


class CheckedLine(NamedTuple):
    """A line of the file, numbered from 1; ``model`` is empty with a ``problem``."""

    number: int
    model: str
    problem: LineProblem | None


class LineProblem(ValueError):
    """A line is no request of the batch; ``code`` and ``param`` as in OpenAI's errors."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


_line_decoder = msgspec.json.Decoder(_Line)
_body_decoder = msgspec.json.Decoder(_Body)


def parse_line(text: bytes, endpoint: str) -> BatchLine:
    """Return the request of a line. Raises LineProblem: the line is no request to ``endpoint``."""
    if text.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise LineProblem("invalid_json_line", "the file is in UTF-16: write it in UTF-8")
    try:
        line = _line_decoder.decode(text)
        body = _body_decoder.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineProblem("invalid_json_line", f"no request of a batch: {error}") from None
    if not 0 < len(line.custom_id) <= _MAX_ID_CHARS:
        problem = f"a custom_id has 1 to {_MAX_ID_CHARS} characters"
        raise LineProblem("invalid_custom_id", problem, "custom_id")
    if line.method != "POST":
        raise LineProblem("invalid_method", "the method must be POST", "method")
    if line.url != endpoint:
        problem = f"the url must be the batch's endpoint {endpoint}"
        raise LineProblem("invalid_url", problem, "url")
    if body.stream:
        raise LineProblem("stream_unsupported", "answers of a batch cannot stream", "body.stream")
    return BatchLine(line.custom_id, line.url, body.model, bytes(line.body))


def lines_of(path: Path, endpoint: str, skip: frozenset[int]) -> Iterator[tuple[int, BatchLine]]:
    """Yield the place and the request of each line of a valid file, but those to ``skip``.

    The place counts requests from 0, without empty lines. Raises OSError: the file cannot be read.
    """
    for place, (_, text) in enumerate(_numbered(path)):
        if place not in skip:
            yield place, parse_line(text, endpoint)


def check_lines(path: Path, endpoint: str, max_requests: int) -> Iterator[CheckedLine]:
    """Yield the verdict on each line that is not empty. Raises OSError: the file cannot be read."""
    known: set[str] = set()
    is_empty = True
    for place, (number, text) in enumerate(_numbered(path)):
        is_empty = False
        if place >= max_requests:
            problem = f"more than {max_requests:,} requests"
            yield CheckedLine(number, "", LineProblem("too_many_requests", problem))
            return
        try:
            line = parse_line(text, endpoint)
            if line.custom_id in known:
                raise LineProblem("duplicate_custom_id", "the custom_id occurs twice", "custom_id")
            known.add(line.custom_id)
        except LineProblem as error:
            yield CheckedLine(number, "", error)
        else:
            yield CheckedLine(number, line.model, None)
    if is_empty:
        yield CheckedLine(1, "", LineProblem("empty_file", "the input file has no requests"))


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers in the file, from 1.

    A line that is too long is cut off; a byte order mark is left out.
    """
    number = 1
    with path.open("rb") as file:
        if file.read(len(BOM_UTF8)) != BOM_UTF8:
            file.seek(0)
        while piece := file.readline(MAX_LINE_BYTES):
            if line := piece.strip():
                yield number, line
            number += piece.endswith(b"\n")
