"""Our worker on a GPU, without one: the order in which things are done around vLLM's own."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is not installed")
pytest.importorskip("vllm", reason="the engine is not installed")

from vllm.v1.worker.gpu.cudagraph_utils import (  # noqa: E402
    CudaGraphManager,
    ModelCudaGraphManager,
)
from vllm.v1.worker.gpu.model_states.interface import ModelState  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (  # noqa: E402
    SpeculatorCudaGraphManager,
)
from vllm.v1.worker.gpu_worker import Worker  # noqa: E402

from gpupoold.worker.engine import gpu_worker as worker  # noqa: E402
from gpupoold.worker.threads import TurnThread  # noqa: E402
from gpupoold.worker.weights.stages import StageClock  # noqa: E402


def config_with(world_size: int = 1, **options: Any) -> Any:
    """The parts of vLLM's configuration that decide about late captures."""
    parallel = SimpleNamespace(world_size=world_size)
    given = {"lora_config": None, "speculative_config": None} | options
    return SimpleNamespace(parallel_config=parallel, **given)


def test_pages_stay_until_warm_up_has_ended_on_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Load:
        """A load whose KV is readable and writable for a while."""

        turns, stages = TurnThread(), StageClock()

        @contextlib.contextmanager
        def kv_scratch(self) -> Iterator[None]:
            done.append("KV")
            yield
            done.append("no KV")

        @contextlib.contextmanager
        def weight_scratch(self) -> Iterator[None]:
            done.append("weights are zeros")
            yield
            done.append("no weights")

    def warm_up(_: Worker) -> str:
        done.append("warm-up")
        return "times"

    monkeypatch.setattr(worker, "current_load", Load)
    monkeypatch.setattr(Worker, "compile_or_warm_up_model", warm_up)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("device idle"))
    made = worker.CudaWorker.__new__(worker.CudaWorker)
    made.model_runner, made.vllm_config = Runner([]), config_with()
    assert made.compile_or_warm_up_model() == "times"
    assert done[:3] == ["KV", "weights are zeros", "warm-up"]
    assert done[3:] == ["device idle", "no weights", "no KV"]


def test_steps_run_between_the_captures_of_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the turn thread, while the load waits; and each size is captured without a step."""
    order: list[str] = []
    runner, turns = Runner(order), TurnThread()

    class Load:
        kv_scratch = weight_scratch = contextlib.nullcontext
        stages = StageClock()

    load = Load()
    load.turns = turns  # type: ignore[attr-defined]
    monkeypatch.setattr(worker, "current_load", lambda: load)
    monkeypatch.setattr(CudaGraphManager, "capture", capture_sizes)
    monkeypatch.setattr(Worker, "compile_or_warm_up_model", lambda _: runner.capture_model())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    made = worker.CudaWorker.__new__(worker.CudaWorker)
    made.model_runner, made.vllm_config = runner, config_with()
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(made.compile_or_warm_up_model)
        while not loading.done():
            if turns.has_jobs:
                order.append("step")
                turns.run(0.0)
        loading.result()
    while order[-1] == "step":
        order.pop()
    text, stages = " ".join(order), load.stages.so_far()
    assert (stages.capture_s > 0, stages.compile_s > 0) == (True, True)
    for part in ("warm-up", "prepare 1", "prepare 2"):
        assert f"step {part}" in text
    assert "prepare 1 capture 1" in text
    assert "prepare 2 capture 2" in text
    assert "_dummy_run" not in vars(runner)
    assert CudaGraphManager.capture is capture_sizes


def test_vllm_captures_graphs_of_models_and_drafters_by_the_base_class() -> None:
    """The subclasses' own ``capture`` takes a model first, which must stay a model."""
    for manager in (ModelCudaGraphManager, SpeculatorCudaGraphManager):
        assert issubclass(manager, CudaGraphManager)
        assert "super().capture(create_forward_fn" in inspect.getsource(manager.capture)


def capture_sizes(
    manager: CudaGraphManager, create_forward: Callable[[int], Callable[[], None]]
) -> None:
    """As in vLLM: each size is prepared, then recorded."""
    for size in (1, 2):
        create_forward(size)()


class Graphs(CudaGraphManager):
    """As vLLM's manager of a model's graphs, whose ``capture`` needs a module."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def capture(self, model: Any) -> None:  # type: ignore[override]
        assert not list(model.modules())[1:]

        def create(size: int) -> Callable[[], None]:
            self._order.append(f"prepare {size}")
            return lambda: self._order.append(f"capture {size}")

        super().capture(create)  # type: ignore[arg-type]


class Runner:
    """The parts of a model runner that run the model while it is loaded."""

    def __init__(self, order: list[str]) -> None:
        self._order = order
        self.cudagraph_manager = Graphs(order)

    def _dummy_run(self) -> None:
        self._order.append("warm-up")

    def capture_model(self) -> None:
        self._dummy_run()
        self.cudagraph_manager.capture(torch.nn.Module())


class State:
    """A model's state without graphs of its own."""

    capture_inner_cudagraphs = ModelState.capture_inner_cudagraphs


class StateWithGraphs:
    """A model's state that captures more graphs beside all sizes."""

    def capture_inner_cudagraphs(self, *_: Any) -> None: ...


@pytest.mark.parametrize(
    ("state", "options", "is_late"),
    [
        (State, {}, True),
        (StateWithGraphs, {}, False),
        (State, {"lora_config": 1}, False),
        (State, {"speculative_config": 1}, False),
        (State, {"world_size": 2}, False),
    ],
)
def test_few_sizes_are_captured_by_the_load(
    monkeypatch: pytest.MonkeyPatch,
    state: type[State | StateWithGraphs],
    options: dict[str, Any],
    *,
    is_late: bool,
) -> None:
    """All where later captures would meet adapters, drafters, other ranks or further graphs."""
    told: list[Any] = []

    def capture(*arguments: Any, **named: Any) -> None:
        told.append((arguments[1:], named))

    class Graphs:
        """Captures at once what it would capture first."""

        def __init__(self, _: Any, capture_all: Callable[[], None]) -> None:
            self.capture_first = capture_all

    monkeypatch.setattr(ModelCudaGraphManager, "capture", capture)
    monkeypatch.setattr(worker, "LateGraphs", Graphs)
    made = worker.CudaWorker.__new__(worker.CudaWorker)
    made.vllm_config = config_with(**options)
    made.model_runner = SimpleNamespace(model_state=state())
    manager: Any = ModelCudaGraphManager
    with made._capturing_few():
        manager.capture("manager", "model", has_lora=False)
    assert told == [(("model",), {"has_lora": False})]
    assert (made.graphs is not None) == is_late
    assert manager.capture is capture


@pytest.mark.parametrize(
    ("supported", "first"),
    [
        (["LBNHC", "LBHNC", "BLNHC", "BLHNC"], "BLNHC"),  # any, as FlashAttention has it
        (["LBHNC", "BLHNC"], "BLHNC"),  # FlashInfer's
        (["LBHNC"], "LBHNC"),
    ],
)
def test_blocks_are_outermost_where_attention_takes_that(
    monkeypatch: pytest.MonkeyPatch, supported: list[str], first: str
) -> None:
    monkeypatch.setattr(Worker, "get_supported_kv_cache_layouts", lambda _: supported)
    found = worker.CudaWorker.__new__(worker.CudaWorker).get_supported_kv_cache_layouts()
    assert found[0] == first
    assert set(found) == set(supported)
