"""A lean client of many streams at once, in a separate process: counts chunks, parses little.

``python -m benchmarks.stream_client PORT PATH MODEL STREAMS TOKENS HOST`` requests ``STREAMS``
answers at once, reads all answers to the end and prints the counts as a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpupoold.stats.histogram import percentile

PATHS = ("/v1/completions", "/v1/chat/completions")
_TIMEOUT_S = 300.0
# Enough for the last two chunks, because one of the two has the usage.
_TAIL_BYTES = 2048


@dataclass(slots=True)
class Streamed:
    """What came of all streams; ``wall_s`` is from the first token to the last."""

    tokens: int = 0
    chunks: int = 0
    failed: int = 0
    wall_s: float = 0.0
    read_gap_p99_s: float | None = None


def stream_apart(
    port: int, path: str, model: str, streams: int, tokens: int, host: str = "127.0.0.1"
) -> Streamed:
    """Stream from a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed; its words are on standard error.
    """
    command = [sys.executable, "-m", "benchmarks.stream_client"]
    command += [str(port), path, model, str(streams), str(tokens), host]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return Streamed(**json.loads(done.stdout))


class _Tally:
    """What all readers have seen."""

    def __init__(self) -> None:
        self.streamed = Streamed()
        self.gaps_s: list[float] = []
        self.first_s = 0.0
        self.last_s = 0.0


class _Reader(asyncio.Protocol):
    """One stream: counts chunks as they come, tokens at the end."""

    def __init__(self, request: bytes, tally: _Tally) -> None:
        self._request = request
        self._tally = tally
        self._tail = b""
        self._last_s = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        # A read may end within the beginning of a chunk, so the last bytes are searched again.
        num_chunks = (self._tail[-6:] + data).count(b"data: {")
        self._tail = data[-_TAIL_BYTES:] if len(data) >= 512 else (self._tail + data)[-_TAIL_BYTES:]
        if not num_chunks:
            return
        tally = self._tally
        tally.streamed.chunks += num_chunks
        if self._last_s:
            tally.gaps_s.append(now_s - self._last_s)
        tally.first_s = tally.first_s or now_s
        tally.last_s = self._last_s = now_s

    def connection_lost(self, _: Exception | None) -> None:
        streamed = self._tally.streamed
        try:
            usage = json.loads(self._tail.split(b"data: ")[-2].split(b"\n")[0])["usage"]
            streamed.tokens += usage["completion_tokens"]
            streamed.chunks -= 1  # the chunk with the usage
        except (ValueError, KeyError, IndexError, TypeError):
            streamed.failed += 1
        self.ended.set_result(None)


async def stream(
    port: int, path: str, model: str, streams: int, tokens: int, host: str = "127.0.0.1"
) -> Streamed:
    """Ask for all streams at once; returns when all have ended."""
    loop, tally = asyncio.get_running_loop(), _Tally()
    request = _request(path, model, tokens)
    connecting = (
        loop.create_connection(lambda: _Reader(request, tally), host, port) for _ in range(streams)
    )
    async with asyncio.timeout(_TIMEOUT_S):
        connected = await asyncio.gather(*connecting)
        await asyncio.gather(*(reader.ended for _, reader in connected))
    tally.streamed.wall_s = tally.last_s - tally.first_s
    tally.streamed.read_gap_p99_s = percentile(tally.gaps_s, 0.99)
    return tally.streamed


def _request(path: str, model: str, tokens: int) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": "hello"}]
    else:
        body["prompt"] = [300, 301, 302, 303]
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    return head.encode() + payload


def main(arguments: Sequence[str]) -> None:
    """Run it; see the module."""
    port, path, model, streams, tokens, host = arguments
    streamed = asyncio.run(stream(int(port), path, model, int(streams), int(tokens), host))
    print(json.dumps(asdict(streamed)))


if __name__ == "__main__":
    main(sys.argv[1:])
