"""A stand-in for the daemon that sends synthetic tokens to a frontend as fast as possible.

The frontend is the real process, on a reserved core. All requests are for one model, with a
checkpoint without weights; a step gives each request a token.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from gpupoold.domain import ModelName
from gpupoold.simdevice.models import know, seed_of
from gpupoold.wire.channel import BlockingChannel
from gpupoold.wire.messages import (
    AbortRequests,
    Accept,
    Accepting,
    AccessRules,
    AddRequest,
    AdmissionAnswer,
    CallResult,
    FromFrontend,
    FrontendReady,
    ModelList,
    ModelToLoad,
    Reconfigure,
    RequestProgress,
    ServedModel,
    ServeModel,
    Shutdown,
    StepOutputs,
)

MODEL = "model"
MAX_BODY_BYTES = 10_000_000
_GPU, _DEVICE_BYTES = "H800", 80 << 30
_MAX_MODEL_LEN = 8192
_START_TIMEOUT_S = 120.0
_IDLE_WAIT_S = 0.002
FRONTEND = "benchmarks.frontend_process"
# A frontend that imports vLLM itself.
FRONTEND_ALONE = "gpupoold.frontend"


class FrontendPeer:
    """A frontend and the other end of its channel, in a thread; use as a context manager.

    ``steps_per_s`` is how many tokens a request gets in a second; None: as many as the
    frontend takes. No token is made before ``num_at_once`` requests are there.
    """

    def __init__(self, checkpoint: Path, core: int | None = None) -> None:
        """``core``: the only one that the frontend may run on."""
        self.steps_per_s: float | None = None
        self.num_at_once = 1
        model = ModelToLoad(
            name=ModelName(MODEL),
            source=str(checkpoint),
            path=str(checkpoint),
            max_model_len=_MAX_MODEL_LEN,
        )
        known = know(model, _GPU, _DEVICE_BYTES)
        self._vocabulary = known.vocabulary
        self._mount = ServeModel(call_id=1, model=model, loaded=known.loaded)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.port: int = self._listener.getsockname()[1]
        ours, theirs = socket.socketpair()
        self.process = psutil.Process(start_frontend(theirs, self._listener).pid)
        theirs.close()
        if core is not None:
            self.process.cpu_affinity([core])
        self._channel: BlockingChannel[Any] = BlockingChannel(ours, FromFrontend)
        self._answers: dict[str, _Answer] = {}
        self._is_streaming = False
        self._next_step_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="frontend-peer")

    def __enter__(self) -> Self:
        self._wait(FrontendReady)
        self._channel.send(self._mount)
        answer = self._wait(CallResult)
        assert not answer.error_code, answer.error_message
        row = ServedModel(name=MODEL, aliases=(), state="ready", created_at=time.time())
        for message in opening([row]):
            self._channel.send(message)
        self._wait(Accepting)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self._channel.send(Shutdown())
            self.process.wait(15)
        except psutil.TimeoutExpired:
            self.process.kill()
        finally:
            self._channel.close()
            self._listener.close()

    def cpu_s(self) -> float:
        """CPU time of the frontend so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def _wait(self, kind: type[Any]) -> Any:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            message = self._channel.receive(left_s)
            if isinstance(message, kind):
                return message
        raise TimeoutError(f"no {kind.__name__} of the frontend")

    def _run(self) -> None:
        while not self._stop.is_set():
            wait_s = self._wait_s()
            message = self._channel.receive(wait_s)
            if message is not None:
                self._take(message)
            elif self._is_streaming:
                self._step()

    def _wait_s(self) -> float:
        """How long a message may be waited for before the next step is due."""
        if not self._is_streaming:
            return _IDLE_WAIT_S
        return max(0.0, self._next_step_s - time.monotonic())

    def _take(self, message: object) -> None:
        if isinstance(message, AddRequest):
            self._channel.send(AdmissionAnswer(message.model, message.request_id))
            self._answers[message.request_id] = _Answer(
                message.request_id, message.max_tokens, seed_of(message.request_id)
            )
            if len(self._answers) == self.num_at_once:
                self._is_streaming = True
                self._next_step_s = time.monotonic()
        elif isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                self._answers.pop(request_id, None)

    def _step(self) -> None:
        progress = []
        for answer in list(self._answers.values()):
            token_ids = self._vocabulary.token_ids(answer.seed, answer.num_tokens, 1)
            answer.num_tokens += 1
            is_last = answer.num_tokens == answer.max_tokens
            if is_last:
                del self._answers[answer.request_id]
            progress.append(
                RequestProgress(answer.request_id, token_ids, "length" if is_last else None)
            )
        self._is_streaming = bool(self._answers)
        self._next_step_s += 1 / self.steps_per_s if self.steps_per_s else 0.0
        self._channel.send(StepOutputs(MODEL, time.monotonic(), [], progress))


class _Answer:
    """An answer that is being made."""

    __slots__ = ("max_tokens", "num_tokens", "request_id", "seed")

    def __init__(self, request_id: str, max_tokens: int, seed: int) -> None:
        self.request_id = request_id
        self.max_tokens = max_tokens
        self.seed = seed
        self.num_tokens = 0


def opening(
    models: Sequence[ServedModel], *, is_ready: bool = True
) -> tuple[Reconfigure, AccessRules, ModelList, Accept]:
    """What a frontend has to be told before it answers anybody: its limits, who may ask, and for
    what.
    """
    limits = Reconfigure("warning", 0, MAX_BODY_BYTES, 1024, 256_000_000)
    models_now = ModelList(list(models), ready=is_ready)
    return limits, AccessRules([], are_required=False), models_now, Accept()


def start_frontend(wire: socket.socket, listener: socket.socket) -> subprocess.Popen[bytes]:
    """The process as the daemon starts it, which has vLLM imported already: its end of the
    channel, and where clients connect."""
    descriptors = (wire.fileno(), listener.fileno())
    settings = {"log_level": "warning", "batches_folder": "/dev/null/none"}
    command = [sys.executable, "-m", FRONTEND, "--settings", json.dumps(settings)]
    command += ["--wire-fd", str(descriptors[0]), "--listen-fd", str(descriptors[1])]
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(command, pass_fds=descriptors, env=os.environ | {"PYTHONPATH": path})
