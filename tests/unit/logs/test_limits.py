"""What one place may log, whatever clients send."""

from __future__ import annotations

import io
import logging

import pytest

from gpupoold.logs.files import MAX_RECORDS, MAX_TEXT_CHARS, MAX_TRACEBACKS, WINDOW_S, LogLimit


class Log:
    """A logger with two handlers that share a limit, as the daemon has."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.streams = (io.StringIO(), io.StringIO())
        self.logger = logging.Logger("sample")
        limit = LogLimit(lambda: self.now_s)
        for stream in self.streams:
            handler = logging.StreamHandler(stream)
            handler.addFilter(limit)
            self.logger.addHandler(handler)

    def fails(self, text: str = "failed") -> None:
        try:
            raise ValueError(text)
        except ValueError:
            self.logger.exception("a request failed")

    def says(self, text: str, *values: object) -> None:
        self.logger.info(text, *values)

    def taken(self) -> str:
        first, second = (stream.getvalue() for stream in self.streams)
        assert first == second
        for stream in self.streams:
            stream.seek(0)
            stream.truncate()
        return first


@pytest.mark.parametrize("with_traceback", [True, False])
def test_one_place_is_limited_and_says_so_later(with_traceback: bool) -> None:
    log, limit = Log(), MAX_TRACEBACKS if with_traceback else MAX_RECORDS

    def once() -> None:
        if with_traceback:
            log.fails()
        else:
            log.says("%s%%", "said")

    for _ in range(limit + 7):
        once()
    text = log.taken()
    assert text.count("a request failed" if with_traceback else "said%") == limit
    assert text.count("ValueError: failed") == (limit if with_traceback else 0)
    log.logger.warning("another place")
    assert log.taken() == "another place\n"
    log.now_s += WINDOW_S
    once()
    once()
    text = log.taken()
    assert text.count(" (7 more from here were not logged)\n") == 1
    assert text.count("a request failed" if with_traceback else "said%") == 2


def test_debugging_is_not_limited() -> None:
    log = Log()
    for _ in range(2 * MAX_RECORDS):
        log.logger.debug("detail")
    assert log.taken().count("detail") == 2 * MAX_RECORDS


def test_long_texts_lose_their_middle() -> None:
    log = Log()
    log.says("begin %s end", "x" * 10_000_000)
    text = log.taken()
    assert text.startswith("begin xx")
    assert text.endswith("xx end\n")
    assert "characters left out" in text
    assert len(text) < MAX_TEXT_CHARS + 100
    log.fails("y" * 10_000_000)
    text = log.taken()
    assert "Traceback" in text
    assert len(text) < MAX_TEXT_CHARS + 200


def test_a_record_that_cannot_be_formatted_harms_nobody() -> None:
    log = Log()
    log.says("%d", "no number")
    assert log.taken() == "a record of sample that cannot be formatted\n"
