"""Many connections at once: idle connections cost nothing and stay, active streams complete."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.private_daemon import PrivateDaemon, private_daemon
from benchmarks.stream_client import stream_apart
from gpupoold.checkpoints.dummy import make_dummy_checkpoint

NUM_IDLE, NUM_ACTIVE, ANSWER_TOKENS = 1_000, 500, 64
# Longer than servers usually keep an idle connection.
IDLE_S = 15.0
_START_TIMEOUT_S, _POLL_S = 60.0, 0.1
_PROBE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def run_connections(folder: Path) -> dict[str, Any]:
    """Open the idle ones, half of which have had an answer; let them be; stream beside them; see
    that all are still there."""
    checkpoint = make_dummy_checkpoint(folder, "Qwen2.5-7B")
    with private_daemon('devices = ["sim:4xH800"]\n', folder / "connections") as daemon:
        daemon.add_model("model", checkpoint, max_model_len=2048)
        return asyncio.run(_run(daemon, int(daemon.http_url.rpartition(":")[2])))


async def _run(daemon: PrivateDaemon, port: int) -> dict[str, Any]:
    frontends = _frontends(daemon)
    rss_bytes = _rss_bytes(frontends)
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(NUM_IDLE)]
    for connection in idle[::2]:
        assert await _is_answered(*connection)
    idle_bytes = _rss_bytes(frontends) - rss_bytes
    shares = [_num_connections(one) for one in frontends]
    before_s = _cpu_s(frontends)
    await asyncio.sleep(IDLE_S)
    idle_share = (_cpu_s(frontends) - before_s) / IDLE_S
    started_s = time.monotonic()
    streamed = await asyncio.to_thread(
        stream_apart, port, "/v1/completions", "model", NUM_ACTIVE, ANSWER_TOKENS
    )
    wall_s = time.monotonic() - started_s
    kept = [await _is_answered(*connection) for connection in idle]
    for _, writer in idle:
        writer.close()
    return {
        "idle": NUM_IDLE,
        "idle_s": IDLE_S,
        "idle_kept": sum(kept),
        "idle_of_each_frontend": shares,
        "idle_bytes_each": idle_bytes / NUM_IDLE,
        "idle_cpu_share": idle_share,
        "active": NUM_ACTIVE,
        "active_completed": NUM_ACTIVE - streamed.failed,
        "active_tokens": streamed.tokens,
        "active_wall_s": wall_s,
    }


async def _is_answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    try:
        async with asyncio.timeout(60):
            writer.write(_PROBE)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(b'{"status": "ok"}'))
            return head.startswith(b"HTTP/1.1 200")
    except (OSError, EOFError, TimeoutError):
        return False


def _frontends(daemon: PrivateDaemon) -> list[psutil.Process]:
    """The processes of all frontends, when all of them accept connections."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with daemon.client() as client:
            found = client.status().frontends
        if all(one.state == "ready" for one in found):
            return [psutil.Process(one.pid) for one in found]
        time.sleep(_POLL_S)
    raise TimeoutError(f"not all frontends accepted connections within {_START_TIMEOUT_S:g} s")


def _rss_bytes(processes: list[psutil.Process]) -> int:
    return sum(one.memory_info().rss for one in processes)


def _num_connections(process: psutil.Process) -> int:
    return sum(one.status == "ESTABLISHED" for one in process.net_connections(kind="tcp"))


def _cpu_s(processes: list[psutil.Process]) -> float:
    times = [one.cpu_times() for one in processes]
    return float(sum(one.user + one.system for one in times))
