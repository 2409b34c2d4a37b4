"""Plays the daemon towards a real worker process, for tests below the control plane."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.private_daemon import daemon_environment
from gpupoold.control.live_requests import LiveRequest
from gpupoold.control.requests.core_shell import (
    CoreShell,
    arrived,
    device_up,
    memory_changed,
    model_added,
    run_turn,
    stepped,
)
from gpupoold.domain import ModelName, Role, Targets
from gpupoold.durations import GraphSizes
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import Action, Send, StartTurn
from gpupoold.scheduling.invariants import check_state
from gpupoold.scheduling.policies.named import PolicyOptions, make_policy
from gpupoold.wire import messages as m
from gpupoold.wire.channel import BlockingChannel, ChannelClosed
from tests.functional.import_server import forked_for

_START_TIMEOUT_S = 120.0
_CALL_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0


class Snapshot(NamedTuple):
    """A model's snapshot as the daemon keeps it."""

    fd: int
    layout_digest: str
    self_check: tuple[int, ...]


class WorkerPeer:
    """A worker process on an emulated device, and the daemon's end of its channel.

    ``options`` are more of its command line, ``environment`` is added to this process's. What
    it says goes to ``log_path``, or where this process's messages go.
    """

    def __init__(
        self,
        device_bytes: int,
        kv_host_bytes: int = 256 << 20,
        quota_max_s: float = 4.0,
        self_check_interval: int = 0,
        *,
        options: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        former: WorkerPeer | None = None,
    ) -> None:
        """``former`` has ended: its KV host cache is taken over."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "gpupoold.worker", "--device", "0"]
        told: dict[str, object] = {
            "--parent-pid": os.getpid(),
            "--wire-fd": theirs.fileno(),
            "--device-bytes": device_bytes,
            "--kv-host-bytes": kv_host_bytes,
            "--compute-threads": 1,
            "--log-level": "warning",
        }
        fds = [theirs.fileno()]
        if former is not None:
            assert former.kv_host_fd is not None
            told["--kv-host-fd"] = former.kv_host_fd
            fds.append(former.kv_host_fd)
        told |= options or {}
        command += [text for pair in told.items() for text in map(str, pair)]
        with contextlib.ExitStack() as stack:
            log = None if log_path is None else stack.enter_context(log_path.open("wb"))
            self.process = subprocess.Popen(
                command,
                pass_fds=fds,
                stdout=log,
                stderr=log,
                env=os.environ | _as_of_daemon() | dict(environment or {}),
            )
        theirs.close()
        self.channel: BlockingChannel[m.FromWorker] = BlockingChannel(ours, m.FromWorker)
        self.snapshots: dict[str, Snapshot] = {}
        self.loaded: dict[str, m.LoadedModel] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.switches: list[m.SwitchRecord] = []
        self.wrong_answers: list[m.WrongAnswer] = []
        self.status: m.WorkerStatus | None = None
        self.drafts = m.DraftCounts()
        self.graphs: dict[str, GraphSizes] = {}
        self._calls = 0
        policy = make_policy("gpupool", PolicyOptions(quota_max_s=quota_max_s))
        self.shell = CoreShell(policy, self._carry_out)
        self.state = self.shell.core.state
        self._unsent: dict[str, LiveRequest] = {}
        try:
            self.ready: m.WorkerReady = self.wait(m.WorkerReady, _START_TIMEOUT_S)
        except BaseException:
            self.process.kill()  # it may hold a whole device
            self.process.wait()
            raise
        self.kv_host_fd: int | None = None
        if self.ready.shares_kv_host:
            self.kv_host_fd = self.channel.take_fd()
        self.shell.handle(device_up(0, self.ready, Role.MIXED, is_fixed=True))
        self.channel.send(m.Reconfigure("warning", self_check_interval, 0, 0, 0))

    def wait(self, kind: type[Any], timeout_s: float = 60.0) -> Any:
        """The next message of ``kind``; the others are taken note of."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            message = self.channel.receive(left_s)
            if message is None:
                break
            self._note(message)
            if isinstance(message, kind):
                return message
        self._show_stacks()
        raise TimeoutError(f"no {kind} within {timeout_s} s")

    def load(
        self,
        name: str,
        path: Path,
        *,
        profiling_budget_s: float = 0.0,
        snapshot: Snapshot | None = None,
        timeout_s: float = 60.0,
        kv_identity: str = "",
        **options: Any,
    ) -> m.ModelLoaded:
        """Load a checkpoint in float32, from its snapshot if there is one; fails the test with the
        worker's reason. The snapshot it has then is in ``snapshots``."""
        fields: dict[str, Any] = {"source": name, "dtype": "float32", "max_model_len": 1024}
        model = m.ModelToLoad(name=ModelName(name), path=str(path), **(fields | options))
        if snapshot is None:
            order = m.LoadModel(
                model, profiling_budget_s=profiling_budget_s, kv_identity=kv_identity
            )
            self.channel.send(order)
        else:
            digest, self_check = snapshot.layout_digest, snapshot.self_check
            order = m.LoadModel(model, True, digest, profiling_budget_s, self_check, kv_identity)
            self.channel.send(order, (snapshot.fd,))
        answer = self.wait(m.ModelLoaded | m.ModelFailed, timeout_s)  # type: ignore[arg-type]
        assert isinstance(answer, m.ModelLoaded), answer
        self.snapshots[name] = Snapshot(
            self.channel.take_fd(), answer.layout_digest, answer.self_check
        )
        self.shell.handle(model_added(model.targets, answer.model), e.Hosted(0, name))
        self.loaded[name] = answer.model
        return answer

    def ask(
        self,
        model: str,
        request_id: str,
        prompt: list[int],
        output_token_ids: Sequence[int] = (),
        cache_salt: str | None = None,
        task: str | None = None,
        **sampling: Any,
    ) -> None:
        """Send a greedy request (``sampling`` as in ``encode_request``), or the rest of one
        that has had ``output_token_ids``. It finds prefixes of others with its salt only.
        With a ``task`` the model makes a result."""
        frames = encode_request(request_id, prompt, cache_salt=cache_salt, task=task, **sampling)
        self.tokens[request_id] = []
        order = m.AddRequest(model, request_id, time.monotonic(), len(prompt), 0, frames)
        request = LiveRequest(order, Targets(), output_token_ids=list(output_token_ids))
        self._unsent[request_id] = request
        self.shell.handle(arrived(request))

    def answers_alone(
        self, models: Sequence[str], num_prompts: int, max_tokens: int
    ) -> dict[tuple[str, int], list[int]]:
        """Each prompt's greedy answer by model and index, one after the other."""
        answers = {}
        for model in models:
            for index in range(num_prompts):
                request_id = f"alone-{model}-{index}"
                self.ask(model, request_id, prompt(index), max_tokens=max_tokens)
                self.run_until_ended(request_id)
                answers[model, index] = self.tokens[request_id]
        return answers

    def abort(self, model: str, *request_ids: str) -> None:
        """Cancel requests."""
        self.channel.send(m.AbortRequests(model, list(request_ids)))
        self.shell.handle(*(e.Ended(request_id, is_complete=False) for request_id in request_ids))

    def run_until_ended(self, *request_ids: str, timeout_s: float = 120.0) -> None:
        """Pump until the requests have ended."""
        deadline_s = time.monotonic() + timeout_s
        while not set(request_ids) <= set(self.ended):
            running = set(request_ids) - set(self.ended)
            if time.monotonic() >= deadline_s:
                self._show_stacks()
                raise TimeoutError(f"still running: {running}")
            self.pump(0.5)

    def pump(self, timeout_s: float) -> None:
        """Take note of one message, if one comes."""
        message = self.channel.receive(timeout_s)
        if message is not None:
            self._note(message)

    def call(self, method: str, **arguments: Any) -> Any:
        """A named operation; its error fails the test."""
        self._calls += 1
        self.channel.send(m.Call(self._calls, method, arguments))
        result = self.wait(m.CallResult, _CALL_TIMEOUT_S)
        assert not result.error_code, result.error_message
        return result.result

    def call_many(self, calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
        """Several operations with no engine step in between."""
        for method, arguments in calls:
            self._calls += 1
            self.channel.send(m.Call(self._calls, method, arguments))
        results = [self.wait(m.CallResult) for _ in calls]
        assert not any(result.error_code for result in results), results
        return [result.result for result in results]

    def close(self) -> None:
        """Stop the process as the daemon does; one that does not listen is killed."""
        try:
            with contextlib.suppress(ChannelClosed):
                self.channel.send(m.Shutdown())
                deadline_s = time.monotonic() + _STOP_TIMEOUT_S
                while time.monotonic() < deadline_s:  # a worker may wait with a full channel
                    self.channel.receive(1.0)
            assert self.process.wait(_STOP_TIMEOUT_S) == 0
        finally:
            self.process.kill()
            self.process.wait()
            self.forget()

    def _show_stacks(self) -> None:
        """End the processes of a worker that does not answer, which write their stacks."""
        with contextlib.suppress(psutil.NoSuchProcess):
            leader = self.leader()
            for one in [*leader.children(), leader]:
                one.send_signal(signal.SIGABRT)
            psutil.wait_procs([leader], timeout=_STOP_TIMEOUT_S)

    def leader(self) -> psutil.Process:
        """Return the process of rank 0; the other ranks are its children."""
        leader = psutil.Process(self.process.pid)
        pid = forked_for(leader.cmdline())  # in tests
        return leader if pid is None else psutil.Process(pid)

    def forget(self) -> None:
        """Close the descriptors of a process that has ended."""
        self.channel.close()
        fds = [snapshot.fd for snapshot in self.snapshots.values()]
        for fd in fds if self.kv_host_fd is None else [*fds, self.kv_host_fd]:
            os.close(fd)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send():
                self.channel.send(self._unsent.pop(action.request_id).order_now())
            case StartTurn():
                self.channel.send(run_turn(action))

    def _note(self, message: m.FromWorker) -> None:
        if isinstance(message, m.StepOutputs):
            for item in message.progress:
                self.tokens.setdefault(item.request_id, []).extend(item.new_token_ids)
                if item.finish_reason:
                    self.ended[item.request_id] = item.finish_reason
            self.drafts = self.drafts.plus(message.drafts or m.DraftCounts())
            self.shell.handle(*stepped(0, message))
            check_state(self.state)
        elif isinstance(message, m.MemoryReport):
            self.shell.handle(memory_changed(0, message))
        elif isinstance(message, m.TurnReport):
            self.shell.handle(memory_changed(0, message), e.TurnEnded(0, message.turn_id))
            check_state(self.state)
        elif isinstance(message, m.RequestsFailed):
            self.ended |= dict.fromkeys(message.request_ids, message.message)
            ended = (e.Ended(request_id, is_complete=False) for request_id in message.request_ids)
            self.shell.handle(*ended)
        elif isinstance(message, m.Switched):
            self.switches.append(message.switch)
        elif isinstance(message, m.WrongAnswer):
            self.wrong_answers.append(message)
        elif isinstance(message, m.GraphsCaptured):
            self.graphs[message.model] = message.graphs
        elif isinstance(message, m.WorkerStatus):
            self.status = message


def _as_of_daemon() -> dict[str, str]:
    """The environment with which a daemon starts a worker with one thread."""
    return daemon_environment() | {"OMP_NUM_THREADS": "1"}


def prompt(index: int) -> list[int]:
    """A prompt of token ids, long enough to span KV blocks."""
    rng = random.Random(index)
    return [rng.randrange(300, 1900) for _ in range(20 + 35 * index)]


def encode_request(
    request_id: str,
    prompt: list[int],
    cache_salt: str | None = None,
    task: Any = None,
    mm_features: Any = None,
    **sampling: Any,
) -> list[bytes]:
    """A request as a frontend encodes it, with vLLM's features of its images."""
    from vllm import PoolingParams, SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackEncoder

    fields = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True} | sampling
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=mm_features,
        sampling_params=None if task else SamplingParams(**fields),
        pooling_params=PoolingParams(task=task, use_activation=True) if task else None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=cache_salt,
        data_parallel_rank=None,
    )
    frames: Any = MsgpackEncoder().encode(request)
    return [bytes(frame) for frame in frames]
