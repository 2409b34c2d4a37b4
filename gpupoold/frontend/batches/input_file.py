"""Lines of a batch's input file: one request of OpenAI's protocol per line. Blocking."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
MAX_ERRORS = 50
MAX_LINE_BYTES = 16 << 20
_MAX_ID_CHARS = 512


class BatchLine(msgspec.Struct, frozen=True):
    """A request; ``body`` is JSON as the client wrote it."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    model: str
    stream: Any = None


class LineProblem(ValueError):
    """A line is no request of the batch; ``code`` and ``param`` as in OpenAI's errors."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


_line_decoder = msgspec.json.Decoder(BatchLine)
_body_decoder = msgspec.json.Decoder(_Body)


def parse_line(text: bytes, endpoint: str) -> BatchLine:
    """Return the request of a line.

    Raises:
        LineProblem: the line is no request to ``endpoint``.
    """
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
    return line


def lines_of(path: Path, endpoint: str, skip: frozenset[int]) -> Iterator[tuple[int, BatchLine]]:
    """Yield the number and the request of each line of a valid file, but those to ``skip``.

    Raises:
        OSError: the file cannot be read.
    """
    for number, text in _numbered(path):
        if number not in skip:
            yield number, parse_line(text, endpoint)


def check_lines(
    path: Path, endpoint: str, max_requests: int
) -> Iterator[tuple[int, LineProblem | None]]:
    """Yield the number of each line with its problem, or None.

    Raises:
        OSError: the file cannot be read.
    """
    known: set[str] = set()
    number = -1
    for number, text in _numbered(path):
        if number >= max_requests:
            problem = f"more than {max_requests:,} requests"
            yield number, LineProblem("too_many_requests", problem)
            return
        try:
            line = parse_line(text, endpoint)
            if line.custom_id in known:
                raise LineProblem("duplicate_custom_id", "the custom_id occurs twice", "custom_id")
            known.add(line.custom_id)
        except LineProblem as error:
            yield number, error
        else:
            yield number, None
    if number < 0:
        yield 0, LineProblem("empty_file", "the input file has no requests")


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, numbered from 0; a line that is too long is cut off."""
    number = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            if line := line.strip():
                yield number, line
                number += 1
