"""Effects of another client on a client's streams, measured in a separate process.

``python -m benchmarks.neighbour PORT MODEL STREAMS`` streams answers one after the other on each
of ``STREAMS`` connections until standard input is closed, and prints a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

# Answers are greedy, so repeated streams must have the same text.
_ANSWER_TOKENS = 400
_TIMEOUT_S = 60.0
_NOTED_PAUSE_S = 0.05


@dataclass(slots=True)
class Felt:
    """What streams of one client have seen; ``longest_pause_s`` is between two chunks.

    ``pauses`` are those of some length: when each began, by the wall clock, and its seconds.
    """

    answers: int = 0
    failed: list[str] = field(default_factory=list)
    differing: int = 0
    chunks: int = 0
    longest_pause_s: float = 0.0
    longest_first_s: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)


class Neighbour:
    """Streams in a process of its own, from construction to :meth:`stop`."""

    def __init__(self, port: int, model: str, num_streams: int) -> None:
        command = [sys.executable, "-m", "benchmarks.neighbour", str(port), model, str(num_streams)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def stop(self) -> Felt:
        """End the streams under way and return what they have seen.

        Raises:
            RuntimeError: the process failed.
        """
        said, _ = self._process.communicate()
        if self._process.returncode:
            raise RuntimeError(f"the neighbour ended with status {self._process.returncode}")
        return Felt(**json.loads(said))


class _Streams:
    def __init__(self, port: int, model: str) -> None:
        self._port = port
        body = {"model": model, "prompt": "hello", "max_tokens": _ANSWER_TOKENS}
        body |= {"ignore_eos": True, "stream": True, "temperature": 0, "seed": 1}
        payload = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        self._request = head.encode() + payload
        self._text: str | None = None
        self.felt = Felt()

    async def run(self, is_over: asyncio.Event) -> None:
        """Stream one answer after the other."""
        while not is_over.is_set():
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    text = await self._stream(is_over)
            except (OSError, TimeoutError, ValueError) as error:
                self.felt.failed.append(repr(error)[:300])
                await asyncio.sleep(0.2)
                continue
            if text is None:
                return
            self.felt.answers += 1
            self._text = self._text or text
            self.felt.differing += text != self._text

    async def _stream(self, is_over: asyncio.Event) -> str | None:
        """The text of an answer, None if it was left early."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        last_s, is_first, pieces = time.monotonic(), True, []
        try:
            writer.write(self._request)
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    continue
                now_s = time.monotonic()
                self._note(now_s - last_s, is_first=is_first)
                last_s, is_first = now_s, False
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ValueError(f"{chunk['error']}")
                pieces += [choice["text"] for choice in chunk["choices"]]
                if is_over.is_set():
                    return None
            if is_first:
                raise ValueError("no answer")
            return "".join(pieces)
        finally:
            writer.close()

    def _note(self, pause_s: float, *, is_first: bool) -> None:
        felt = self.felt
        if is_first:
            felt.longest_first_s = max(felt.longest_first_s, pause_s)
        else:
            felt.chunks += 1
            felt.longest_pause_s = max(felt.longest_pause_s, pause_s)
            if pause_s >= _NOTED_PAUSE_S:
                felt.pauses.append((time.time() - pause_s, pause_s))


async def _run(port: int, model: str, num_streams: int) -> Felt:
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, is_over.set)
    streams = _Streams(port, model)
    await asyncio.gather(*(streams.run(is_over) for _ in range(num_streams)))
    return streams.felt


def main(arguments: Sequence[str]) -> None:
    """Run it; see the module."""
    port, model, num_streams = arguments
    print(json.dumps(asdict(asyncio.run(_run(int(port), model, int(num_streams))))))


if __name__ == "__main__":
    main(sys.argv[1:])
