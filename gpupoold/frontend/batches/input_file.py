"""Lines of a batch's input file: one request of OpenAI's protocol per line. Blocking."""

from __future__ import annotations

from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
MAX_ERRORS = 50
MAX_LINE_BYTES = 16 << 20
_MAX_ID_CHARS = 512


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
    """Return the request of a line.

    Raises:
        LineProblem: the line is no request to ``endpoint``.
    """
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

    The place counts requests from 0, without empty lines.

    Raises:
        OSError: the file cannot be read.
    """
    for place, (_, text) in enumerate(_numbered(path)):
        if place not in skip:
            yield place, parse_line(text, endpoint)


def check_lines(path: Path, endpoint: str, max_requests: int) -> Iterator[CheckedLine]:
    """Yield the verdict on each line that is not empty.

    Raises:
        OSError: the file cannot be read.
    """
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
