"""The other end of a frontend's channel: daemon and worker in one thread, with real engines.

Engines are vLLM's own ``EngineCore``s on the CPU, loaded once and stepped in
turns of one step. The frontend is the real process, started as the daemon does.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil

from benchmarks.frontend_peer import opening, start_frontend
from gpupoold.domain import ModelName
from gpupoold.wire.channel import BlockingChannel, ChannelClosed
from gpupoold.wire.messages import (
    AbortRequests,
    Accept,
    Accepting,
    AddRequest,
    AdmissionAnswer,
    CallResult,
    FromFrontend,
    LoadedModel,
    ModelToLoad,
    Ping,
    Pong,
    RequestProgress,
    ServedModel,
    ServeModel,
    Shutdown,
    StepOutputs,
)
from tests.functional.import_server import forked_for
from tests.support.vllm_environment import ENVIRONMENT

RETRY_AFTER_S = 6.3
MAX_MODEL_LEN = 512
_KV_BYTES = 16 << 20
_IDLE_WAIT_S = 0.01


class EngineSet:
    """Real engines by model name, in this process; used by one thread."""

    def __init__(self, paths: dict[str, Path]) -> None:
        os.environ.update(ENVIRONMENT)
        self.loaded: dict[str, LoadedModel] = {}
        self._engines: dict[str, Any] = {}
        import torch
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        # Two threads that spin for each other on a busy machine are far slower than one.
        torch.set_num_threads(1)
        self._decode = MsgpackDecoder(EngineCoreRequest).decode
        self._encode = MsgpackEncoder().encode
        for name, path in paths.items():
            self._load(name, path)

    def _load(self, name: str, path: Path) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        config = EngineArgs(
            model=str(path),
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            dtype="float32",
            kv_cache_memory_bytes=_KV_BYTES,
        ).create_engine_config()
        engine = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._engines[name] = engine
        self.loaded[name] = LoadedModel(
            name=name,
            architecture=config.model_config.architecture,
            max_model_len=MAX_MODEL_LEN,
            dtype="float32",
            block_size=config.cache_config.block_size,
            num_gpu_blocks=config.cache_config.num_gpu_blocks or 1,
            weight_bytes=0,
            kv_bytes_per_token=0,
            supported_tasks=("generate",),
        )

    def add(self, request: AddRequest) -> None:
        """Give a request to its model's engine."""
        engine = self._engines[request.model]
        engine.add_request(*engine.preprocess_add_request(self._decode(request.frames)))

    def abort(self, model: str, request_ids: list[str]) -> None:
        """Drop requests; ids that have ended are ignored."""
        self._engines[model].abort_requests(request_ids)

    def busy(self) -> list[str]:
        """Models with something to do."""
        return [name for name, engine in self._engines.items() if engine.scheduler.has_requests()]

    def open_requests(self, name: str) -> set[str]:
        """Ids of a model's requests that have not ended."""
        return set(self._engines[name].scheduler.requests)

    def step(self, name: str) -> list[StepOutputs]:
        """One step of a model: what its requests gained."""
        outputs, _ = self._engines[name].step_fn()
        return [
            StepOutputs(
                model=name,
                at_s=time.monotonic(),
                frames=[bytes(frame) for frame in self._encode(of_client)],
                progress=[
                    RequestProgress(
                        output.request_id,
                        output.new_token_ids,
                        str(output.finish_reason) if output.finished else None,
                    )
                    for output in of_client.outputs
                ],
            )
            for of_client in (outputs or {}).values()
        ]


class EnginePeer:
    """Plays the daemon for one frontend process; ``start`` it, then talk HTTP to ``url``."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self.paths = paths
        self.received: list[msgspec.Struct] = []
        self.hold_steps = threading.Event()
        self.num_to_admit: int | None = None  # further requests; None: all
        self._changed = threading.Condition()
        self._outbox: queue.Queue[msgspec.Struct] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="engine-peer")
        self._stop = threading.Event()
        self._next_call_id = 0
        self._failure: BaseException | None = None
        self._loaded = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        ours, theirs = socket.socketpair()
        self._wire = ours
        self.process = start_frontend(theirs, self._listener)
        theirs.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.send(Shutdown())
        try:
            status = self.process.wait(15)
        finally:
            self.process.kill()
            self.process.wait()
            self._stop.set()
            self._thread.join()
            self._listener.close()
        assert status == 0

    @property
    def pid(self) -> int:
        """The frontend's process, which ``process`` may stand for."""
        proxied = forked_for(psutil.Process(self.process.pid).cmdline())
        return self.process.pid if proxied is None else proxied

    def let_accept(self) -> None:
        """Let the frontend of a peer that was never entered accept connections."""
        channel: BlockingChannel[Any] = BlockingChannel(self._wire, FromFrontend)
        channel.send(Accept())

    def hang_up(self) -> None:
        """Close the channel of a peer that was never entered, as a dying daemon would."""
        self._wire.close()
        self._listener.close()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message for the frontend."""
        self._outbox.put(message)

    def wait_for(
        self, wanted: Callable[[msgspec.Struct], bool], timeout_s: float = 20
    ) -> msgspec.Struct:
        """The first message received so far, or soon, that is wanted."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: self._failure or next(filter(wanted, self.received), None), timeout_s
            )
        if isinstance(found, BaseException):
            raise found
        if found is None:
            raise TimeoutError(f"not among {len(self.received)} messages")
        return found

    def serve(self, name: str, **changes: Any) -> CallResult:
        """Mount a model's API, waiting for the answer."""
        self._next_call_id += 1
        call_id = self._next_call_id
        model = ModelToLoad(name=ModelName(name), source="a", path=str(self.paths[name]))
        model = dataclasses.replace(model, **changes)
        loaded = msgspec.structs.replace(self.engines.loaded[name], name=name)
        self.send(ServeModel(call_id=call_id, model=model, loaded=loaded))
        answer = self.wait_for(lambda m: isinstance(m, CallResult) and m.call_id == call_id)
        assert isinstance(answer, CallResult)
        return answer

    def announce(self, *models: ServedModel, ready: bool = True) -> None:
        """Tell the frontend which models exist, and wait until the frontend knows."""
        num_received = len(self.received)
        for message in (*opening(models, is_ready=ready), Ping()):
            self.send(message)
        before = list(map(id, self.received[:num_received]))
        self.wait_for(lambda m: isinstance(m, Pong) and id(m) not in before)

    def wait_ready(self, timeout_s: float = 120) -> None:
        """Until the frontend accepts connections and the engines are loaded."""
        self.send(Accept())
        self.wait_for(lambda m: isinstance(m, Accepting), timeout_s)
        with self._changed:
            assert self._changed.wait_for(lambda: self._failure or self._loaded, timeout_s)

    def _run(self) -> None:
        try:
            self._channel: BlockingChannel[Any] = BlockingChannel(self._wire, FromFrontend)
            self.engines = EngineSet(self.paths)
            with self._changed:
                self._loaded = True
                self._changed.notify_all()
            while not self._stop.is_set():
                self._turn()
        except ChannelClosed:
            pass
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._wire.close()

    def _turn(self) -> None:
        while not self._outbox.empty():
            self._channel.send(self._outbox.get())
        busy = [] if self.hold_steps.is_set() else self.engines.busy()
        message = self._channel.receive(0 if busy else _IDLE_WAIT_S)
        if message is not None:
            self._take(message)
        for name in busy:
            for outputs in self.engines.step(name):
                self._channel.send(outputs)

    def _take(self, message: msgspec.Struct) -> None:
        if isinstance(message, AddRequest):
            self._admit(message)
        elif isinstance(message, AbortRequests):
            self.engines.abort(message.model, message.request_ids)
        with self._changed:
            self.received.append(message)
            self._changed.notify_all()

    def _admit(self, request: AddRequest) -> None:
        model, request_id = request.model, request.request_id
        if self.num_to_admit == 0:
            refusal = AdmissionAnswer(model, request_id, 429, "There are too many.", RETRY_AFTER_S)
            self._channel.send(refusal)
            return
        if self.num_to_admit is not None:
            self.num_to_admit -= 1
        self._channel.send(AdmissionAnswer(model, request_id))
        self.engines.add(request)


def added_since(peer: EnginePeer, start: int, model: str, count: int = 1) -> list[str]:
    """The ids of the first ``count`` requests for the model received after ``start``."""
    ids: list[str] = []

    def complete_set() -> bool:
        added = [m for m in peer.received[start:] if isinstance(m, AddRequest)]
        ids[:] = [m.request_id for m in added if m.model == model]
        return len(ids) >= count

    until(complete_set)
    return ids


def wait_aborted(peer: EnginePeer, *request_ids: str) -> None:
    """Until the frontend has aborted all these requests."""

    def all_aborted() -> bool:
        aborted = [m.request_ids for m in peer.received if isinstance(m, AbortRequests)]
        return set(request_ids) <= {lost for ids in aborted for lost in ids}

    until(all_aborted)


def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    """Wait for a condition."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
