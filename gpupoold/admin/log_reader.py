"""The processes' log files as one stream of lines, for ``gpupool logs``."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

_POLL_S = 0.25
_MAX_TAIL_BYTES = 8 << 20


async def follow_logs(
    paths: dict[str, Path],
    num_lines: int,
    *,
    follow: bool,
    is_gone: Callable[[], Awaitable[bool]],
) -> AsyncIterator[str]:
    """NDJSON of ``{"line": "process | text"}``: the last lines of each file, then new ones."""
    offsets = {name: path.stat().st_size for name, path in paths.items()}
    for name, path in paths.items():
        for line in await asyncio.to_thread(_tail, path, offsets[name], num_lines):
            yield _encode(name, line)
    while follow and not await is_gone():
        await asyncio.sleep(_POLL_S)
        for name, path in paths.items():
            lines, offsets[name] = await asyncio.to_thread(_new_lines, path, offsets[name])
            for line in lines:
                yield _encode(name, line)


def _tail(path: Path, end: int, num_lines: int) -> list[str]:
    start = max(0, end - _MAX_TAIL_BYTES)
    with path.open("rb") as file:
        file.seek(start)
        text = file.read(end - start).decode(errors="replace")
    return list(deque(text.splitlines(), maxlen=num_lines))


def _new_lines(path: Path, offset: int) -> tuple[list[str], int]:
    """Whole lines from ``offset``; a file that became shorter was rotated and starts anew."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(offset if size >= offset else 0)
        start = file.tell()
        data = file.read(_MAX_TAIL_BYTES)
    whole = data.rfind(b"\n") + 1
    return data[:whole].decode(errors="replace").splitlines(), start + whole


def _encode(name: str, line: str) -> str:
    return json.dumps({"line": f"{name} | {line}"}) + "\n"
