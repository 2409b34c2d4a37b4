"""Times until killed processes are replaced.

The worker of an emulated device with two models is killed (SIGKILL) during an answer, then the
frontend. Times are measured from the signal on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from benchmarks.bench.rig import device_config
from benchmarks.load import client_of, token_ids_of
from benchmarks.private_daemon import PrivateDaemon, private_daemon
from benchmarks.processes import module_of

MAX_MODEL_LEN = 1024
DEVICE_BYTES = 64 << 20
NUM_TOKENS = 900
_POLL_S = 0.005
_TIMEOUT_S = 60.0

Times = dict[str, float]


def run_restarts(checkpoints: Sequence[Path], rounds: int) -> dict[str, Any]:
    """Kill and measure, so many times.

    Raises:
        GpupoolError: the models could not be served.
    """
    # A single frontend, because a second frontend would go on serving.
    with private_daemon(device_config(DEVICE_BYTES), server="frontends = 1") as daemon:
        for path in checkpoints:
            daemon.add_model(path.name, path, dtype="float32", max_model_len=MAX_MODEL_LEN)
        name = checkpoints[0].name
        times = [
            asyncio.run(_kill_worker(daemon, name)) | _kill_frontend(daemon, name)
            for _ in range(rounds)
        ]
    return {"p50_s": {key: median(one[key] for one in times) for key in times[0]}, "rounds": times}


async def _kill_worker(daemon: PrivateDaemon, model: str) -> Times:
    """Until the device is ready again, all models are, and the stream goes on."""
    token_times_s: list[float] = []
    streaming = asyncio.create_task(_stream(daemon, model, token_times_s))
    while not token_times_s:
        await asyncio.sleep(_POLL_S)
    killed = _process(daemon, "gpupoold.worker")
    killed_s = time.monotonic()
    killed.kill()
    ready_s = await asyncio.to_thread(_until, lambda: _is_back(daemon, killed.pid))
    loaded_s = await asyncio.to_thread(_until, lambda: _all_ready(daemon))
    await streaming
    assert len(token_times_s) >= NUM_TOKENS, "the answer is not whole"
    goes_on_s = next(at_s for at_s in token_times_s if at_s > ready_s)
    return {
        "worker_ready": ready_s - killed_s,
        "worker_models_ready": loaded_s - killed_s,
        "worker_stream_goes_on": goes_on_s - killed_s,
    }


def _kill_frontend(daemon: PrivateDaemon, model: str) -> Times:
    """Until a connection that is made at once is accepted and answered; and a request is."""
    killed_s = time.monotonic()
    _process(daemon, "gpupoold.frontend").kill()
    with httpx.Client(base_url=daemon.http_url, timeout=_TIMEOUT_S) as http:
        http.get("/health")
        accepted_s = time.monotonic()
        body = {"model": model, "prompt": "hello", "max_tokens": 1}
        served_s = _until(lambda: http.post("/v1/completions", json=body).status_code == 200)
    return {"frontend_accepts": accepted_s - killed_s, "frontend_serves": served_s - killed_s}


async def _stream(daemon: PrivateDaemon, model: str, token_times_s: list[float]) -> None:
    async with client_of(daemon.http_url) as client:
        async for token_ids in token_ids_of(client, model, "a long story", NUM_TOKENS):
            token_times_s += [time.monotonic()] * len(token_ids)


def _process(daemon: PrivateDaemon, module: str) -> psutil.Process:
    everyone = psutil.Process(daemon.process.pid).children(recursive=True)
    [found] = [one for one in everyone if module_of(one) == module]
    return found


def _is_back(daemon: PrivateDaemon, killed_pid: int) -> bool:
    with daemon.client() as client:
        [device] = client.ps().devices
    return device.state == "ready" and device.pid != killed_pid


def _all_ready(daemon: PrivateDaemon) -> bool:
    with daemon.client() as client:
        return all(model.state == "ready" for model in client.models())


def _until(holds: Callable[[], bool]) -> float:
    """When it held first."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)
    return time.monotonic()
