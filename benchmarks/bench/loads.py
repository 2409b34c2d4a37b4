"""Pauses of a stream while another model is added to its device, on a private daemon."""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bench.rig import device_config, make_checkpoints, weight_bytes
from benchmarks.private_daemon import PrivateDaemon, private_daemon
from gpupool_cli.diagnostics import say
from gpupoold.errors import Failed, TimedOut
from gpupoold.units import format_bytes

MAX_MODEL_LEN = 2048
MAX_EXTRA_PAUSE_S = 0.1
"""The longest pause may be so much longer than the longest pause without a load."""

_MAX_TOKENS = 1900
_WARM_UP_TOKENS = 10
_MIN_UNDISTURBED_S = 2.0
_TIMEOUT_S = 120.0
_POLL_S = 0.01
_SLACK_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class LoadRound:
    """Gaps between the tokens of a stream without and with a load, and the load's times."""

    undisturbed_gaps_s: Sequence[float]
    gaps_s: Sequence[float]
    alone_s: float
    beside_s: float


def run_load_bench(folder: Path, size_bytes: int, rounds: int) -> dict[str, Any]:
    """Add a model with and without a stream of another model, on a device with space for both.

    Raises:
        GpupoolError: the models could not be made or served.
    """
    say(f"making two checkpoints of {format_bytes(size_bytes)}")
    serving, added = make_checkpoints(folder, ["llama", "qwen3"], size_bytes)
    with private_daemon(device_config(int(2.3 * size_bytes) + _SLACK_BYTES)) as daemon:
        say(f"loading {serving.name}")
        _add(daemon, serving)
        measured = []
        for number in range(rounds):
            say(f"adding {added.name} without and with a stream, round {number + 1} of {rounds}")
            measured.append(_round(daemon, serving.name, added))
    return summary(measured, weight_bytes(added))


def summary(rounds: Sequence[LoadRound], num_bytes: int) -> dict[str, Any]:
    """Return the figures of at least one round."""
    before_s = max(max(one.undisturbed_gaps_s) for one in rounds)
    pause_s = max(max(one.gaps_s) for one in rounds)
    limit_s = before_s + MAX_EXTRA_PAUSE_S
    return {
        "bytes": num_bytes,
        "rounds": len(rounds),
        "undisturbed_pause_s": before_s,
        "undisturbed_p50_s": statistics.median(_all(one.undisturbed_gaps_s for one in rounds)),
        "pause_s": pause_s,
        "pause_p50_s": statistics.median(_all(one.gaps_s for one in rounds)),
        "tokens_while_loading": sum(len(one.gaps_s) for one in rounds),
        "limit_s": limit_s,
        "reached": pause_s <= limit_s,
        "load_alone_s": statistics.median(one.alone_s for one in rounds),
        "load_beside_stream_s": statistics.median(one.beside_s for one in rounds),
    }


def _all(gaps: Iterator[Sequence[float]]) -> list[float]:
    return [gap for some in gaps for gap in some]


def _round(daemon: PrivateDaemon, serving: str, added: Path) -> LoadRound:
    alone_s = _add(daemon, added)
    _remove(daemon, added.name)
    with _streaming(daemon.http_url, serving) as stream:
        stream.wait_for(_WARM_UP_TOKENS)
        began_s = time.perf_counter()
        stream.wait_until(began_s + max(_MIN_UNDISTURBED_S, alone_s))
        load_began_s = time.perf_counter()
        beside_s = _add(daemon, added)
        ended_s = time.perf_counter()
        stream.wait_for(len(stream.times_s) + 2)
        times_s = list(stream.times_s)
    _remove(daemon, added.name)
    return LoadRound(
        gaps_between(times_s, began_s, max(at_s for at_s in times_s if at_s <= load_began_s)),
        gaps_between(times_s, load_began_s, ended_s),
        alone_s,
        beside_s,
    )


def gaps_between(times_s: Sequence[float], begin_s: float, end_s: float) -> list[float]:
    """Return the gaps between successive times that overlap the span."""
    return [
        after - before for before, after in pairwise(times_s) if after > begin_s and before < end_s
    ]


def _add(daemon: PrivateDaemon, checkpoint: Path) -> float:
    """Add a model; return the seconds until the model serves."""
    started_s = time.perf_counter()
    daemon.add_model(checkpoint.name, checkpoint, dtype="float32", max_model_len=MAX_MODEL_LEN)
    return time.perf_counter() - started_s


def _remove(daemon: PrivateDaemon, name: str) -> None:
    with daemon.client() as client:
        client.remove_model(name)


@dataclass(slots=True)
class _Stream:
    """A stream in another thread, with the time of each token's arrival."""

    times_s: list[float] = field(default_factory=list)
    error: Exception | None = None
    has_ended: bool = False
    is_over: bool = False

    def run(self, url: str, model: str) -> None:
        body = {
            "model": model,
            "prompt": "Once upon a time",
            "max_tokens": _MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            with (
                httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client,
                client.stream("POST", f"{url}/v1/completions", json=body) as response,
            ):
                if response.is_error:
                    raise Failed(f"{url}: HTTP {response.status_code}")
                for line in response.iter_lines():
                    if self.is_over:
                        return
                    if line.startswith("data: {"):
                        self._take(line)
        except Exception as error:
            self.error = error
        self.has_ended = True

    def wait_for(self, num_tokens: int) -> None:
        """Return when the stream has so many tokens."""
        deadline_s = time.perf_counter() + _TIMEOUT_S
        while len(self.times_s) < num_tokens:
            if time.perf_counter() > deadline_s:
                raise TimedOut("the stream does not begin")
            self._poll()

    def wait_until(self, at_s: float) -> None:
        """Return at ``at_s``."""
        while time.perf_counter() < at_s:
            self._poll()

    def _poll(self) -> None:
        if self.error is not None:
            raise self.error
        if self.has_ended:
            raise Failed(f"the stream ended after {len(self.times_s)} tokens", "use a larger model")
        time.sleep(_POLL_S)

    def _take(self, line: str) -> None:
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise Failed(f"the stream ended with {chunk['error']}")
        self.times_s.append(time.perf_counter())


@contextlib.contextmanager
def _streaming(url: str, model: str) -> Iterator[_Stream]:
    stream = _Stream()
    thread = threading.Thread(target=stream.run, args=(url, model), daemon=True)
    thread.start()
    try:
        yield stream
    finally:
        stream.is_over = True
        thread.join(_TIMEOUT_S)
