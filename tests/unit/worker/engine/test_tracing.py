"""Steps wait while vLLM traces a model of Transformers in another thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

import torch
from torch import fx, nn

from gpupoold.worker.engine.vllm_process import tracing_alone
from gpupoold.worker.threads import TurnThread


class Probe(nn.Module):
    """A module that notes at each call whether steps wait."""

    def __init__(self, turns: TurnThread) -> None:
        super().__init__()
        self.seen: list[bool] = []
        self._turns = turns

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        self.seen.append(self._turns.is_held)
        return numbers


def test_steps_wait_for_the_tracer() -> None:
    """Torch's tracer replaces the call of modules in the whole process."""
    turns = TurnThread()
    probe = Probe(turns)

    def trace() -> None:
        with tracing_alone(turns):
            fx.Tracer().trace(probe)
        probe(torch.zeros(1))

    with ThreadPoolExecutor(1) as threads:
        tracing = threads.submit(trace)
        while not tracing.done():
            turns.run(0.01)
        tracing.result()
    assert probe.seen == [True, False]
    assert fx.Tracer.trace.__name__ == "trace"


def test_a_trace_of_another_thread_waits_for_nobody() -> None:
    """A step that compiles a function traces it, while a load reads a model."""
    turns = TurnThread()
    probe = Probe(turns)
    with tracing_alone(turns), ThreadPoolExecutor(1) as threads:
        threads.submit(fx.Tracer().trace, probe).result(timeout=60)
    assert probe.seen == [False]
