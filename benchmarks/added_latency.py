"""Latency that the API layer adds to a request, compared with vLLM's own server.

Both servers run at the same time and answer alternately over a kept connection each, with one-token
answers of a tiny model. The work in the engine is the same, so differences come from the API
layer. A random draw decides for each pair of requests the order of the two servers. Some
requests have a schema: a schema known to both servers, or a new schema each time, which the
frontend compiles in a child process first.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.bench.overhead import vllm_serve
from benchmarks.bench.rig import emulated_config, weight_bytes
from benchmarks.private_daemon import private_daemon
from gpupoold.errors import Failed
from gpupoold.stats.histogram import percentile

KINDS = ("whole", "streamed")
"""Kinds of requests with a limit."""
_MAX_MODEL_LEN = 1024
_PROMPT_TOKENS = 24
_WARM_UP = 20
_SEED = 7
_TIMEOUT_S = 60.0


def run_added_latency(checkpoint: Path, pairs: int) -> dict[str, Any]:
    """Times of ``pairs`` requests of each kind to each server.

    Raises:
        GpupoolError: a server did not start, or refused a request.
    """
    config = emulated_config(int(1.5 * weight_bytes(checkpoint)) + (64 << 20))
    name = checkpoint.name
    with private_daemon(config) as daemon, vllm_serve(checkpoint, _MAX_MODEL_LEN) as vllm_url:
        daemon.add_model(name, checkpoint, dtype="float32", max_model_len=_MAX_MODEL_LEN)
        servers = [_Server("gpupool", daemon.http_url), _Server("vllm", vllm_url)]
        try:
            return {kind: _compare(servers, name, _FIELDS[kind], pairs) for kind in _FIELDS}
        finally:
            for server in servers:
                server.close()


class _Server:
    """One kept connection."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._http = http.client.HTTPConnection(host, int(port), timeout=_TIMEOUT_S)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def ask(self, body: bytes) -> float:
        """Seconds until the answer's last byte.

        Raises:
            Failed: the server refused.
        """
        started_s = time.perf_counter()
        self._http.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = self._http.getresponse()
        answer = response.read()
        seconds = time.perf_counter() - started_s
        if response.status != 200:
            raise Failed(f"{self.name}: HTTP {response.status}: {answer[:300]!r}")
        return seconds


def _compare(
    servers: list[_Server], model: str, fields: Callable[[Random], dict[str, Any]], pairs: int
) -> dict[str, Any]:
    rng = Random(_SEED)
    for _ in range(_WARM_UP):
        body = _body(model, rng, fields(rng))
        for server in servers:
            server.ask(body)
    times_s: dict[str, list[float]] = {server.name: [] for server in servers}
    for _ in range(pairs):
        body = _body(model, rng, fields(rng))
        for server in rng.sample(servers, len(servers)):
            times_s[server.name].append(server.ask(body))
    added_s = [ours - theirs for ours, theirs in zip(*times_s.values(), strict=True)]
    p50_s = {name: statistics.median(values) for name, values in times_s.items()}
    return {
        "pairs": pairs,
        "added_p50_s": p50_s["gpupool"] - p50_s["vllm"],
        "gpupool_p50_s": p50_s["gpupool"],
        "vllm_p50_s": p50_s["vllm"],
        "gpupool_p99_s": percentile(times_s["gpupool"], 0.99),
        "vllm_p99_s": percentile(times_s["vllm"], 0.99),
        "added_of_pairs_p50_s": statistics.median(added_s),
        "added_of_pairs_p25_s": percentile(added_s, 0.25),
        "added_of_pairs_p75_s": percentile(added_s, 0.75),
    }


def _body(model: str, rng: Random, fields: dict[str, Any]) -> bytes:
    """A prompt of its own, so that no prefix cache answers."""
    prompt = [rng.randrange(300, 1900) for _ in range(_PROMPT_TOKENS)]
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    return json.dumps(body | {"ignore_eos": True} | fields).encode()


def _with_schema(number: int) -> dict[str, Any]:
    """An object of ten fields, named by the number."""
    properties = {f"field_{number}_{index}": {"type": "string"} for index in range(10)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"structured_outputs": {"json": schema}}


_FIELDS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "whole": lambda _: {"stream": False},
    "streamed": lambda _: {"stream": True},
    "known_schema": lambda _: _with_schema(0),
    "new_schema": lambda rng: _with_schema(rng.randrange(1, 1 << 30)),
}
