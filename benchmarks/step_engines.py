"""One model of one layer in two engines of a process: gpupool's turn loop and vLLM's own loop.

The steps of both alternate, each first in every second pair, so that a busy machine and what the
other engine leaves in the caches affect both alike. The host's time of a step is the processor time
of the stepping thread outside of the executor, whose calls prepare the same inputs and run the same
model in both engines.
"""

from __future__ import annotations

import json
import queue
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import zmq
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from gpupoold.domain import ModelName, Targets
from gpupoold.memory.host import KvHostCache
from gpupoold.memory.pages import PagePool
from gpupoold.wire import messages as m
from gpupoold.wire.channel import BlockingChannel
from gpupoold.worker.calls import answer
from gpupoold.worker.device import open_device
from gpupoold.worker.engine.cpu_build import adapt_cpu_build
from gpupoold.worker.turns.loads import EngineLoader
from gpupoold.worker.turns.loop import TurnLoop
from gpupoold.worker.turns.models import WorkerDevice
from tests.functional.worker_peer import encode_request

MAX_LEN = 1024
MAX_SEQS = 64
NUM_PROMPT_TOKENS = 24
_DEVICE_BYTES = 256 << 20
_KV_BYTES = 128 << 20
_WARM_UP_STEPS = 30
_READER = """
import sys, zmq
socket = zmq.Context().socket(zmq.PULL)
socket.bind(sys.argv[1])
while True:
    socket.recv_multipart()
"""


def one_layer(checkpoint: Path, folder: Path) -> Path:
    """Copy a tiny checkpoint with its first layer only."""
    made = folder / "one-layer"
    shutil.copytree(checkpoint, made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    file = made / "model.safetensors"
    tensors = load_file(file)
    kept = {n: t for n, t in tensors.items() if ".layers." not in n or ".layers.0." in n}
    save_file(kept, file, metadata={"format": "pt"})
    return made


class ExecutorClock:
    """The processor time in an executor's calls, which a step makes."""

    def __init__(self, core: Any) -> None:
        self.spent_s = 0.0
        executor = core.model_executor
        for name in ("execute_model", "sample_tokens"):
            setattr(executor, name, self._timed(getattr(executor, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started_s = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent_s += time.thread_time() - started_s

        return timed


class PoolSide:
    """The worker's turn loop with the model, beside ``num_idle`` other models."""

    def __init__(self, path: Path, num_idle: int) -> None:
        device = open_device("emulated", _DEVICE_BYTES + num_idle * (16 << 20), 0, 0)
        pool = PagePool(device.num_pages, device.table_pages)
        host = KvHostCache(64 << 20)
        ours, theirs = socket.socketpair()
        # Another process reads, as the daemon does: a thread would compete for the interpreter.
        self._reader = subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        theirs.close()
        channel: BlockingChannel[m.ToWorker] = BlockingChannel(ours, m.ToWorker)
        own = WorkerDevice(0, device, pool, host, None, 1e9)
        self._loop = TurnLoop(own, channel, answer)
        for number in range(num_idle + 1):
            self._load(f"m{number}", path, device, host)
        self._engine = self._loop.engines["m0"]
        self._loop.orders.take(m.RunTurn(1, "m0", 1e9))
        self._loop.switch_to("m0")
        self._loop.orders.began(time.monotonic())
        self.executor = ExecutorClock(self._engine._core)

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        frames = encode_request(request_id, prompt, cache_salt=request_id, max_tokens=max_tokens)
        self._loop._add_request(m.AddRequest("m0", request_id, 0.0, len(prompt), 1, frames))

    def step(self) -> None:
        """What the turn loop does between two steps, and one step."""
        loop, engine = self._loop, self._engine
        loop.residency.advance(engine.name)
        loop._prefetch(engine.name)
        if not engine.kv.is_whole and not engine.is_ready():
            loop.residency.wait_ready(engine.name)
        loop._step(engine)
        loop._receive()
        loop.orders.is_quota_used(time.monotonic())

    def has_requests(self) -> bool:
        return self._engine.has_requests()

    def close(self) -> None:
        self._reader.kill()
        self._reader.wait()

    def _load(self, name: str, path: Path, device: Any, host: KvHostCache) -> None:
        loop = self._loop
        model = m.ModelToLoad(
            name=ModelName(name),
            source=str(path),
            path=str(path),
            dtype="float32",
            max_model_len=MAX_LEN,
            targets=Targets(1.0, 1.0),
        )
        loop._models.last_used_s[name] = 0.0
        loop.ledger.add_model(name, Targets(1.0, 1.0))
        loader = EngineLoader(device, host, loop.residency, loop.turns, loop.driver_memory)
        order = m.LoadModel(model, profiling_budget_s=0.0)
        loop.engines[name] = loader.load(order, None, name).engine


class VllmSide:
    """vLLM's engine, stepped as ``EngineCoreProc`` does; a process reads its outputs."""

    def __init__(self, path: Path, folder: Path) -> None:
        config = EngineArgs(
            model=str(path),
            enforce_eager=True,
            max_model_len=MAX_LEN,
            dtype="float32",
            block_size=32,
            kv_cache_memory_bytes=_KV_BYTES,
        ).create_engine_config()
        self._core: Any = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._decode = MsgpackDecoder(EngineCoreRequest).decode
        self.executor = ExecutorClock(self._core)
        self.outputs: queue.Queue[Any] = queue.Queue()
        self._encoder = MsgpackEncoder()
        address = f"ipc://{folder}/outputs"
        self._reader = subprocess.Popen([sys.executable, "-c", _READER, address])
        self._socket = zmq.Context().socket(zmq.PUSH)
        self._socket.connect(address)

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        frames = encode_request(request_id, prompt, cache_salt=request_id, max_tokens=max_tokens)
        core = self._core
        core.add_request(*core.preprocess_add_request(self._decode(frames)))

    def step(self) -> None:
        outputs, executed = self._core.step_fn()
        for output in outputs.items() if outputs else ():
            self.outputs.put_nowait(output)
        self._core.post_step(executed)

    def send(self) -> None:
        """What vLLM's output thread does with the outputs of a step."""
        while not self.outputs.empty():
            frames = self._encoder.encode_into(self.outputs.get()[1], bytearray())
            self._socket.send_multipart(frames, copy=False, track=True)

    def has_requests(self) -> bool:
        return bool(self._core.scheduler.has_requests())

    def close(self) -> None:
        self._reader.kill()
        self._reader.wait()


def measure(
    folder: Path, checkpoint: Path, num_idle: int, streams: Sequence[int], num_steps: int
) -> dict[str, Any]:
    """Return the host time of a decode step in microseconds by number of streams."""
    adapt_cpu_build()
    torch.set_num_threads(1)
    pool, vllm = PoolSide(checkpoint, num_idle), VllmSide(checkpoint, folder)
    sides: dict[str, Any] = {"gpupool": pool, "vllm": vllm}
    try:
        return {str(count): _compare(sides, count, num_steps) for count in streams}
    finally:
        for side in sides.values():
            side.close()


def _compare(sides: dict[str, Any], num_streams: int, num_steps: int) -> dict[str, float]:
    for side in sides.values():
        for index in range(num_streams):
            prompt = [1 + (7 * index + at) % 200 for at in range(NUM_PROMPT_TOKENS)]
            name = f"{num_streams}-{index}"
            side.add(name, prompt, num_steps + 2 * _WARM_UP_STEPS)
    for _ in range(_WARM_UP_STEPS):
        for side in sides.values():
            side.step()
            if isinstance(side, VllmSide):
                side.send()
    host: dict[str, list[float]] = {name: [] for name in (*sides, "sending")}
    steps: dict[str, list[float]] = {name: [] for name in sides}
    orders = cycle((list(sides.items()), list(sides.items())[::-1]))
    for order in islice(orders, num_steps):
        for name, side in order:
            executed_s, started_s = side.executor.spent_s, time.thread_time()
            side.step()
            stepped_s = time.thread_time()
            steps[name].append(stepped_s - started_s)
            host[name].append(stepped_s - started_s - (side.executor.spent_s - executed_s))
            if isinstance(side, VllmSide):
                side.send()
                host["sending"].append(time.thread_time() - stepped_s)
    while any(side.has_requests() for side in sides.values()):
        for side in sides.values():
            side.step()
    middle = {name: 1e6 * _low(times) for name, times in host.items()}
    return {
        "gpupool_host_us": middle["gpupool"],
        "vllm_host_us": middle["vllm"],
        "vllm_sending_us": middle["sending"],
        "added_us": middle["gpupool"] - middle["vllm"] - middle["sending"],
        "added_to_step_thread_us": middle["gpupool"] - middle["vllm"],
        "gpupool_step_us": 1e6 * _low(steps["gpupool"]),
        "vllm_step_us": 1e6 * _low(steps["vllm"]),
    }


def _low(times_s: list[float]) -> float:
    """The fifth of the times from below: other work of the machine only makes steps longer."""
    return sorted(times_s)[len(times_s) // 5]
