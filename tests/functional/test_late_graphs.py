"""Graphs of further sizes are captured while a device has no work, as played on emulated ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpupoold.checkpoints.tiny import Recipe, make_checkpoint
from gpupoold.durations import GraphSizes
from gpupoold.wire import messages as m
from tests.functional.worker_peer import WorkerPeer, prompt

if TYPE_CHECKING:
    from gpupoold.worker.turns.loop import TurnLoop

MODEL = "tiny-llama"
NUM_SIZES = 60


class PlayedGraphs:
    """Takes the time of a capture; on the CPU there are no graphs."""

    def __init__(self) -> None:
        self.sizes = GraphSizes(1, num_left=NUM_SIZES)

    def capture_next(self) -> None:
        time.sleep(0.05)
        sizes = self.sizes
        self.sizes = replace(sizes, num_late=sizes.num_late + 1, num_left=sizes.num_left - 1)


def play_graphs(loop: TurnLoop, model: str) -> dict[str, Any]:
    """Give a model's engine graphs of further sizes, in the worker."""
    loop.engine(model).worker.graphs = PlayedGraphs()  # type: ignore[assignment]
    return {}


OPERATIONS = {"play_graphs": play_graphs}


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[WorkerPeer]:
    peer = WorkerPeer(256 << 20, environment={"GPUPOOL_OPERATIONS": __name__})
    try:
        peer.load(MODEL, make_checkpoint(tmp_path, Recipe("llama", 4 << 20)))
        peer.call("play_graphs", model=MODEL)
        yield peer
    finally:
        peer.close()


def test_requests_end_the_captures(peer: WorkerPeer) -> None:
    """At once: after a request's arrival at most the size is captured that was begun."""
    expected = peer.answers_alone([MODEL], 1, 200)
    for index in range(3):
        first = peer.wait(m.GraphsCaptured)
        assert first.graphs.num_late + first.graphs.num_left == NUM_SIZES
        request_id = f"r{index}"
        peer.ask(MODEL, request_id, prompt(0), max_tokens=200)
        late: list[int] = []
        while request_id not in peer.ended:
            message = peer.channel.receive(60.0)
            assert message is not None
            if isinstance(message, m.GraphsCaptured):
                late.append(message.graphs.num_late)
                assert not peer.tokens[request_id]
            peer._note(message)
        assert late in ([], [first.graphs.num_late + 1])
        assert peer.tokens[request_id] == expected[MODEL, 0]


def test_a_model_waits_until_it_is_on_the_device(peer: WorkerPeer) -> None:
    peer.wait(m.GraphsCaptured)
    peer.call("page_out", model=MODEL)
    seen: list[m.FromWorker] = []
    deadline_s = time.monotonic() + 2.0
    while time.monotonic() < deadline_s:
        message = peer.channel.receive(0.2)
        if message is not None:
            peer._note(message)
            seen.append(message)
    assert any(isinstance(one, m.WorkerStatus) for one in seen)
    assert not any(isinstance(one, m.GraphsCaptured) for one in seen)
    peer.ask(MODEL, "r", prompt(0), max_tokens=5)
    peer.run_until_ended("r")
    peer.wait(m.GraphsCaptured)
