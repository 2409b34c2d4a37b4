"""Sends malformed requests to a daemon and classifies the answers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.malformed_requests import MalformedRequest

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
# An error inside a stream, after the status line was sent.
_STREAM_STATUS = re.compile(rb'"code": ?(5\d\d)\b')
_AT_ONCE = 24
_PATIENCE_S = 1.5
_MAX_ANSWER_BYTES = 1 << 20


@dataclass(slots=True)
class Outcome:
    """What came of all mutants."""

    statuses: Counter[int] = field(default_factory=Counter)
    unanswered: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[MalformedRequest, int, bytes]] = field(default_factory=list)
    """Those with an answer of 5xx that is not 503: its status and bytes."""
    wall_s: float = 0.0

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "requests": self.statuses.total() + self.unanswered.total(),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "unanswered": dict(self.unanswered),
            "server_errors": len(self.wrong),
            "wall_s": self.wall_s,
        }


async def send_malformed_requests(
    address: int | Path,
    malformed_requests: Iterable[MalformedRequest],
    at_once: int = _AT_ONCE,
    patience_s: float = _PATIENCE_S,
) -> Outcome:
    """Send each on a connection of its own, some at a time, to a local port or a unix socket.

    A mutant whose answer takes long, as it may ask for a long one or be only the beginning of a
    request, is left after some time.
    """
    outcome, started_s, pending = Outcome(), time.monotonic(), iter(malformed_requests)

    async def work() -> None:
        for malformed_request in pending:
            note(
                outcome,
                malformed_request,
                await exchange(address, malformed_request.data, patience_s),
            )

    await asyncio.gather(*(work() for _ in range(at_once)))
    outcome.wall_s = time.monotonic() - started_s
    return outcome


def note(outcome: Outcome, malformed_request: MalformedRequest, answer: bytes) -> None:
    """Count an answer."""
    statuses = [int(status) for status in _STATUS.findall(answer) if int(status) >= 200]
    if not statuses:
        outcome.unanswered[malformed_request.kind] += 1
        return
    outcome.statuses[statuses[0]] += 1
    inside = [int(status) for status in _STREAM_STATUS.findall(answer)]
    for status in [*statuses, *inside]:
        if status >= 500 and status != 503:
            outcome.wrong.append((malformed_request, status, answer[:2000]))
            break


async def exchange(address: int | Path, data: bytes, patience_s: float = _PATIENCE_S) -> bytes:
    """What the server says until it closes the connection or ``patience_s`` are over."""
    answer = bytearray()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(patience_s):
            reader, writer = await _connect(address)
            try:
                writer.write(data)
                while chunk := await reader.read(1 << 16):
                    answer += chunk
                    if len(answer) > _MAX_ANSWER_BYTES:
                        break
            finally:
                writer.close()
    return bytes(answer)


async def _connect(address: int | Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(address, Path):
        return await asyncio.open_unix_connection(address)
    return await asyncio.open_connection("127.0.0.1", address)
