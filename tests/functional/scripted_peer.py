"""The other end of a frontend's channel, which answers requests with given tokens.

The frontend is the real process, started as the daemon does; nothing computes, so that any answer
of any model can be played back.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.frontend_peer import opening, start_frontend
from gpupoold.domain import ModelName
from gpupoold.wire.channel import BlockingChannel, ChannelClosed
from gpupoold.wire.messages import (
    Accepting,
    AddRequest,
    AdmissionAnswer,
    CallResult,
    FromFrontend,
    FrontendReady,
    LoadedModel,
    ModelToLoad,
    RequestProgress,
    ServedModel,
    ServeModel,
    Shutdown,
    StepOutputs,
)

MAX_MODEL_LEN = 16384
_START_TIMEOUT_S = 180.0
_IDLE_WAIT_S = 0.01


class ScriptedPeer:
    """A frontend with mounted models; use as a context manager.

    ``script`` has the tokens of the next answers by model.
    """

    def __init__(
        self, checkpoints: Mapping[str, Path], engine: Mapping[str, dict[str, str]] | None = None
    ) -> None:
        """``engine`` has the engine options by model."""
        self.script: dict[str, Sequence[int]] = {}
        self.requests: list[AddRequest] = []
        self._checkpoints = checkpoints
        self._engine = engine or {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        ours, theirs = socket.socketpair()
        self._process = start_frontend(theirs, self._listener)
        theirs.close()
        self._channel: BlockingChannel[Any] = BlockingChannel(ours, FromFrontend)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scripted-peer")

    def __enter__(self) -> Self:
        try:
            self._wait(FrontendReady)
            for call_id, name in enumerate(self._checkpoints):
                self._channel.send(self._mount(call_id, name))
                answer = self._wait(CallResult)
                assert not answer.error_code, f"{name}: {answer.error_message}"
            models = [
                ServedModel(name=name, aliases=(), state="ready", created_at=time.time())
                for name in self._checkpoints
            ]
            for message in opening(models):
                self._channel.send(message)
            self._wait(Accepting)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        try:
            self._channel.send(Shutdown())
            self._process.wait(15)
        finally:
            self._process.kill()
            self._process.wait()
            self._channel.close()
            self._listener.close()

    def _mount(self, call_id: int, name: str) -> ServeModel:
        model = ModelToLoad(
            name=ModelName(name),
            source=name,
            path=str(self._checkpoints[name]),
            max_model_len=MAX_MODEL_LEN,
            engine=self._engine.get(name, {}),
        )
        loaded = LoadedModel(
            name=name,
            architecture="",
            max_model_len=MAX_MODEL_LEN,
            dtype="float32",
            block_size=32,
            num_gpu_blocks=1024,
            weight_bytes=0,
            kv_bytes_per_token=0,
            supported_tasks=("generate",),
        )
        return ServeModel(call_id=call_id, model=model, loaded=loaded)

    def _wait(self, kind: type[Any]) -> Any:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            message = self._channel.receive(left_s)
            if isinstance(message, kind):
                return message
        raise TimeoutError(f"no {kind.__name__} of the frontend")

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                message = self._channel.receive(_IDLE_WAIT_S)
                if isinstance(message, AddRequest):
                    self._answer(message)
        except ChannelClosed:
            pass

    def _answer(self, request: AddRequest) -> None:
        self.requests.append(request)
        self._channel.send(AdmissionAnswer(request.model, request.request_id))
        token_ids = self.script[request.model]
        for index, token_id in enumerate(token_ids, 1):
            reason = "stop" if index == len(token_ids) else None
            progress = RequestProgress(request.request_id, [token_id], reason)
            self._channel.send(StepOutputs(request.model, time.monotonic(), [], [progress]))
