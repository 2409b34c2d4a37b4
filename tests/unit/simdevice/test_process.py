"""The process as the daemon has it: started, asked, stopped, in real time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpupoold.checkpoints.dummy import make_dummy_checkpoint
from gpupoold.domain import ModelName
from gpupoold.latency.models import DecodeBatch
from gpupoold.sim.boxes import Box
from gpupoold.system.activity import Activity, ThreadPhase, create_page, digest, read_page
from gpupoold.wire import messages as m
from gpupoold.wire.channel import BlockingChannel

PROMPT = list(range(1300, 1400))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dummy_checkpoint(tmp_path_factory.mktemp("dummy-weights"), "Qwen2.5-7B")


class Peer:
    """The daemon's end."""

    def __init__(self, env: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "gpupoold.simdevice", "--device", "3", "--gpu", "H800"]
        command += ["--parent-pid", str(os.getpid()), "--wire-fd", str(theirs.fileno())]
        self.activity_fd = create_page()
        command += ["--activity-fd", str(self.activity_fd)]
        passed = (theirs.fileno(), self.activity_fd)
        self.process = subprocess.Popen(command, pass_fds=passed, env=env)
        theirs.close()
        self.channel: BlockingChannel[m.FromWorker] = BlockingChannel(ours, m.FromWorker)

    def wait(self, kind: type[Any], timeout_s: float = 10.0) -> Any:
        """The next message of ``kind``; others before it are dropped."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            message = self.channel.receive(left_s)
            if isinstance(message, kind):
                return message
        raise TimeoutError(f"no {kind.__name__}")

    def load(self, name: str, path: Path, **how: Any) -> Any:
        """Load a model; the answer."""
        model = m.ModelToLoad(name=ModelName(name), source="a", path=str(path), **how)
        self.channel.send(m.LoadModel(model, profiling_budget_s=1.0))
        return self.wait((m.ModelLoaded, m.ModelFailed))  # type: ignore[arg-type]

    def ask(self, model: str, request_id: str, max_tokens: int, prompt: list[int] = PROMPT) -> None:
        """Send a request."""
        self.channel.send(
            m.AddRequest(model, request_id, time.monotonic(), len(prompt), max_tokens, [b"opaque"])
        )

    def answer(self, request_id: str) -> tuple[list[int], list[float], str]:
        """The whole of an answer, its times, and why it ended."""
        tokens: list[int] = []
        times_s: list[float] = []
        while True:
            outputs = self.wait(m.StepOutputs)
            for item in outputs.progress:
                if item.request_id == request_id:
                    tokens += item.new_token_ids
                    times_s += [outputs.at_s] * len(item.new_token_ids)
                    if item.finish_reason:
                        return tokens, times_s, item.finish_reason


@pytest.fixture
def peer(project_env: dict[str, str]) -> Iterator[Peer]:
    peer = Peer(project_env)
    yield peer
    peer.channel.close()
    assert peer.process.wait(10) == 0, "it leaves when the daemon is gone"
    os.close(peer.activity_fd)


def test_it_introduces_itself_and_is_light(peer: Peer, checkpoint: Path) -> None:
    ready = peer.wait(m.WorkerReady)
    assert ready.device_name == "sim:H800"
    assert ready.facts.device_bytes == Box(1, "H800").device_bytes
    assert ready.facts.bandwidth_bytes_per_s > 1e9
    assert ready.facts.kv_host_limit_bytes is None
    assert ready.engine_version.startswith("sim ")
    peer.load("m", checkpoint)
    assert psutil.Process(peer.process.pid).memory_info().rss < 60e6


def test_it_serves_at_its_pace(peer: Peer, checkpoint: Path) -> None:
    loaded = peer.load("m", checkpoint)
    assert loaded.has_snapshot is False
    decode = loaded.profile.decode.decode_law()
    peer.ask("m", "r", max_tokens=100)
    peer.channel.send(m.RunTurn(1, "m", 4.0))
    tokens, times_s, reason = peer.answer("r")
    assert (len(tokens), reason) == (100, "length")
    expected_s = sum(decode.predict_s(DecodeBatch(1, 101 + k)) for k in range(99))
    assert times_s[-1] - times_s[0] == pytest.approx(expected_s, abs=0.1)
    assert peer.wait(m.TurnReport).turn_id == 1
    peer.channel.send(m.Call(7, "check_integrity"))
    result = peer.wait(m.CallResult)
    assert (result.call_id, result.error_code) == (7, "")
    assert result.result["pages"] > result.result["free_pages"]


def test_its_page_tells_what_it_does(peer: Peer, checkpoint: Path) -> None:
    peer.load("m", checkpoint)
    assert read_page(peer.activity_fd) == []
    for request_id in ("r", "q"):
        peer.ask("m", request_id, max_tokens=10_000)
    peer.channel.send(m.RunTurn(1, "m", 4.0))
    for _ in range(4):
        peer.wait(m.StepOutputs)
    both = frozenset({digest("r"), digest("q")})
    assert read_page(peer.activity_fd) == [Activity(ThreadPhase.STEP, "m", both)]
    peer.channel.send(m.AbortRequests("m", ["r", "q"]))
    peer.wait(m.TurnReport)
    assert read_page(peer.activity_fd) == []


def test_status_tells_what_it_holds(peer: Peer, checkpoint: Path) -> None:
    loaded = peer.load("m", checkpoint).model
    peer.ask("m", "r", max_tokens=10_000)
    peer.channel.send(m.RunTurn(1, "m", 4.0))
    peer.wait(m.StepOutputs)
    peer.wait(m.WorkerStatus)
    status = peer.wait(m.WorkerStatus)
    assert (status.activity.on_turn, status.quota_s) == ("m", 4.0)
    [row] = status.models
    assert row.weights_resident_bytes == row.weights_total_bytes == loaded.weight_bytes
    assert row.kv_resident_bytes > 0
    assert (row.num_live, row.num_waiting) == (1, 0)
    peer.channel.send(m.AbortRequests("m", ["r"]))
    peer.channel.send(m.UnloadModel("m"))
    assert peer.wait(m.ModelUnloaded).name == "m"
    assert peer.wait(m.WorkerStatus).models == []


def test_requests_that_cannot_be_served_fail_with_the_reason(peer: Peer, checkpoint: Path) -> None:
    peer.load("m", checkpoint, max_model_len=100)
    peer.ask("m", "long", max_tokens=1)
    assert (
        "leaves no room for an answer: the limit of m is 100 tokens"
        in peer.wait(m.RequestsFailed).message
    )
    peer.ask("other", "r", max_tokens=1)
    assert "other is not loaded on device 3" in peer.wait(m.RequestsFailed).message
    peer.ask("m", "open", max_tokens=0, prompt=PROMPT[:90])
    peer.channel.send(m.RunTurn(1, "m", 4.0))
    assert len(peer.answer("open")[0]) == 10, "without a limit, up to the model's length"


def test_refusals(peer: Peer, tmp_path: Path) -> None:
    failed = peer.load("m", tmp_path)
    assert isinstance(failed, m.ModelFailed)
    assert "has no config.json" in failed.message
    peer.channel.send(m.Call(1, "bench_switch", {"models": ["a", "b"], "rounds": 1}))
    result = peer.wait(m.CallResult)
    assert "simulates a H800 and cannot do bench_switch" in result.error_message


def test_shutdown(peer: Peer) -> None:
    peer.wait(m.WorkerReady)
    peer.channel.send(m.Shutdown())
    assert peer.process.wait(10) == 0
