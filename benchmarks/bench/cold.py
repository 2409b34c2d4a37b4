"""Cold start: from a snapshot on disk to a running model, without page cache."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.client import AdminClient
from gpupoold.errors import Failed, TimedOut
from gpupoold.stats.histogram import percentile

_SAVE_TIMEOUT_S = 120.0
_REQUEST_TIMEOUT_S = 120.0
_POLL_S = 0.1
# As the daemon reads: see gpupoold.control.weights.snapshot_files.
_READ_BYTES = 256 << 10
_CHUNK_BYTES = 16 << 20
_NUM_READERS = min(16, max(4, len(os.sched_getaffinity(0))))
_READ_SHARE = 0.9
_PROMPT = "Once upon a time"


@dataclass(frozen=True, slots=True)
class ColdStart:
    """A start from disk, and its references; all in seconds."""

    warm_s: float
    request_s: float
    resident_request_s: float
    plain_read_s: float

    @property
    def switch_s(self) -> float:
        """The extra wait of a request for one token, compared with a resident model."""
        return max(0.0, self.request_s - self.resident_request_s)

    @property
    def total_s(self) -> float:
        """From the disk to where a resident model is."""
        return self.warm_s + self.switch_s


def measure_cold(
    daemon: PrivateDaemon, models: Sequence[str], rounds: int, host_cached_limit_s: float
) -> dict[str, Any]:
    """Drop each model's snapshot in turn, read its file plainly, then run the model again.

    The files must be the only ones in the daemon's snapshot folder, of about one size.

    Raises:
        GpupoolError: a snapshot could not be saved or restored.
    """
    starts: list[ColdStart] = []
    with daemon.client() as client, httpx.Client(timeout=_REQUEST_TIMEOUT_S) as http:
        files = _wait_saved(daemon, client, models)
        for index in range((1 + rounds) * len(models)):
            start = _start(client, http, daemon.http_url, models[index % len(models)], files)
            if index >= len(models):
                starts.append(start)
    return summary(starts, files[0].stat().st_size, host_cached_limit_s)


def summary(
    starts: Sequence[ColdStart], num_bytes: int, host_cached_limit_s: float
) -> dict[str, Any]:
    """Return the figures of at least one start.

    The limit is a read of the file at nine tenths of a plain read's speed, plus the limit of a
    switch from host memory.
    """
    totals_s = [start.total_s for start in starts]
    read_s = median(start.plain_read_s for start in starts)
    p50_s, limit_s = median(totals_s), read_s / _READ_SHARE + host_cached_limit_s
    return {
        "p50_s": p50_s,
        "p99_s": percentile(totals_s, 0.99),
        "samples": len(starts),
        "bytes": num_bytes,
        "stages_p50_s": {
            "read_s": median(start.warm_s for start in starts),
            "switch_s": median(start.switch_s for start in starts),
        },
        "plain_read_p50_s": read_s,
        "resident_request_p50_s": median(start.resident_request_s for start in starts),
        "limit_s": limit_s,
        "limit_of": "p50_s",
        "ratio": p50_s / limit_s,
        "reached": p50_s <= limit_s,
    }


def _start(
    client: AdminClient, http: httpx.Client, url: str, model: str, files: Sequence[Path]
) -> ColdStart:
    client.drop_snapshot(model)
    plain_read_s = sum(map(_plain_read_s, files)) / len(files)
    for file in files:
        _forget(file)
    started_s = time.perf_counter()
    client.warm(model)
    warm_s = time.perf_counter() - started_s
    request_s = _request_s(http, url, model)
    return ColdStart(warm_s, request_s, _request_s(http, url, model), plain_read_s)


def _wait_saved(daemon: PrivateDaemon, client: AdminClient, models: Sequence[str]) -> list[Path]:
    """Return the snapshot files, which are written after the models are ready."""
    deadline_s = time.monotonic() + _SAVE_TIMEOUT_S
    while sum(one.is_saved for one in client.cache().models) < len(models):
        if time.monotonic() > deadline_s:
            raise TimedOut("the models' snapshots are not saved", f"see {daemon.log_path}")
        time.sleep(_POLL_S)
    folder = daemon.log_path.parent / "state" / "snapshots"
    return sorted(folder.glob("*.snapshot"))


def _plain_read_s(file: Path) -> float:
    """Return the seconds to read an uncached file into new shared memory.

    Uses as many threads as the daemon, without checksums. Includes the kernel's allocation of
    memory, as any start from disk does.
    """
    _forget(file)
    num_bytes = file.stat().st_size
    memory = os.memfd_create("bench-read")
    try:
        with file.open("rb", buffering=0) as stream:

            def read_chunk(start: int) -> None:
                buffer = bytearray(_READ_BYTES)
                for offset in range(start, min(start + _CHUNK_BYTES, num_bytes), _READ_BYTES):
                    num_read = os.preadv(stream.fileno(), [buffer], offset)
                    os.pwrite(memory, memoryview(buffer)[:num_read], offset)

            started_s = time.perf_counter()
            os.posix_fallocate(memory, 0, num_bytes)
            with ThreadPoolExecutor(_NUM_READERS) as readers:
                for _ in readers.map(read_chunk, range(0, num_bytes, _CHUNK_BYTES)):
                    pass
            return time.perf_counter() - started_s
    finally:
        os.close(memory)


def _forget(file: Path) -> None:
    """Take a file out of the page cache."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _request_s(http: httpx.Client, url: str, model: str) -> float:
    """Return the seconds until a short prompt is answered with one token."""
    body = {"model": model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
    started_s = time.perf_counter()
    response = http.post(f"{url}/v1/completions", json=body)
    if response.is_error:
        raise Failed(f"{model}: HTTP {response.status_code}: {response.text[:300]}")
    return time.perf_counter() - started_s
