"""Gates before decoder layers: in order, passed by every step, and shut for missing weights."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

from hypothesis import given, strategies as st
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.worker.engine.layer_gates import (
    LayerGate,
    LayerGates,
    WrongOrder,
    plan_gates,
    recorded_calls,
)

NAMES = [f"model.layers.{number}.attn" for number in range(3)]
ENDS = (100, 200, 300)
CALLS = list(zip(NAMES, range(3), strict=True))


class Layer(AttentionLayerBase):
    """An attention layer of vLLM's."""

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> None:
        raise NotImplementedError


class Weights:
    """Weights of 350 bytes that arrive when waited for."""

    num_bytes = 350

    def __init__(self) -> None:
        self.present = 100
        self.waits: list[int] = []
        self.error: Exception | None = None

    @property
    def is_resident(self) -> bool:
        return self.present == self.num_bytes

    def wait_for(self, num_bytes: int) -> None:
        if self.error is not None:
            raise self.error
        self.waits.append(num_bytes)
        self.present = max(self.present, num_bytes)


class Box:
    def __init__(self) -> None:
        self.compilation = CompilationConfig()
        self.layers: dict[str, Any] = {name: Layer() for name in NAMES}
        self.layers["model.layers.0.experts"] = object()
        self.compilation.static_forward_context = self.layers
        self.compilation.cudagraph_mode = CUDAGraphMode.NONE
        self.weights = cast(Any, Weights())
        self.ticks = iter(range(1000))
        gates = plan_gates(CALLS, ENDS, self.weights.num_bytes)
        self.gates = LayerGates(
            "m", gates, self.weights, self.compilation, clock=lambda: next(self.ticks)
        )

    def forward(self, names: list[str]) -> list[int]:
        """Use layers as vLLM's custom operations do; the bytes present behind each use."""
        layers = self.compilation.static_forward_context
        context = ForwardContext(no_compile_layers=layers, attn_metadata={}, slot_mapping={})
        present = []
        with override_forward_context(context):
            for name in names:
                assert get_forward_context().no_compile_layers[name] is self.layers[name]
                present.append(self.weights.present)
        return present


@pytest.fixture
def box() -> Iterator[Box]:
    made = Box()
    yield made
    WORKER.main.clear()
    WORKER.end_steps()


def output(*num_tokens: int) -> Any:
    return SimpleNamespace(num_scheduled_tokens={str(i): n for i, n in enumerate(num_tokens)})


@given(numbers=st.lists(st.none() | st.integers(0, 4), max_size=8), num_layers=st.integers(0, 4))
def test_gates_are_there_only_for_all_layers_in_order(
    numbers: list[int | None], num_layers: int
) -> None:
    ends = [10 * (layer + 1) for layer in range(num_layers)]
    calls = [(f"layer-{index}", layer) for index, layer in enumerate(numbers)]
    gates = plan_gates(calls, ends, 99)
    in_order = sorted(set(range(num_layers)) | {one for one in numbers if one is not None})
    layers = [one for one in numbers if one is not None]
    is_right = layers == numbers == sorted(layers) and [*dict.fromkeys(layers)] == in_order
    assert bool(gates) == (is_right and num_layers >= 2 and max(layers) < num_layers)
    for index, gate in enumerate(gates):
        # All that runs before the next attention layer is there.
        following = layers[index + 1] if index + 1 < len(layers) else None
        assert gate == LayerGate(f"layer-{index}", 99 if following is None else ends[following])


def test_each_layer_waits_for_the_next_and_the_last_for_all(box: Box) -> None:
    with box.gates.closed(output(5)):
        names = [NAMES[0], NAMES[0], "model.layers.0.experts", NAMES[1], NAMES[2], NAMES[2]]
        assert box.forward(names) == [200, 200, 200, 300, 350, 350]
    assert box.weights.waits == [200, 300, 350]
    assert box.gates.take_waited_s() == 3
    assert box.gates.take_waited_s() == 0
    assert box.gates.are_open
    assert box.compilation.static_forward_context is box.layers


@pytest.mark.parametrize(
    "names",
    [[], NAMES[:2], [NAMES[1]], [NAMES[0], NAMES[2]], [*NAMES, NAMES[0]], NAMES[::-1]],
    ids=["none", "not all", "not the first", "one is left out", "again", "backwards"],
)
def test_a_step_in_another_order_is_an_error(box: Box, names: list[str]) -> None:
    with pytest.raises(WrongOrder), box.gates.closed(output(5)):
        box.forward(names)
    assert box.compilation.static_forward_context is box.layers


@pytest.mark.parametrize(
    ("mode", "num_tokens", "is_gated"),
    [
        (CUDAGraphMode.NONE, (1, 1), True),
        (CUDAGraphMode.PIECEWISE, (1, 1), True),
        (CUDAGraphMode.FULL, (5, 1), False),
        (CUDAGraphMode.FULL_AND_PIECEWISE, (5, 1), True),
        (CUDAGraphMode.FULL_AND_PIECEWISE, (1, 1), False),
        (CUDAGraphMode.FULL_DECODE_ONLY, (2,), True),
        (CUDAGraphMode.FULL_DECODE_ONLY, (1,), False),
    ],
)
def test_a_graph_of_a_whole_step_waits_for_all_before(
    box: Box, mode: CUDAGraphMode, num_tokens: tuple[int, ...], is_gated: bool
) -> None:
    box.compilation.cudagraph_mode = mode
    with box.gates.closed(output(*num_tokens)):
        assert box.weights.is_resident == (not is_gated)
        if is_gated:
            box.forward(NAMES)
    assert box.weights.is_resident


def test_uses_outside_of_a_step_pass_no_gate(box: Box) -> None:
    with box.gates.closed(output(5)):
        assert box.compilation.static_forward_context[NAMES[2]] is box.layers[NAMES[2]]
        assert box.weights.waits == []
        box.forward(NAMES)


def test_a_failed_copy_is_the_fault_of_no_request(box: Box) -> None:
    WORKER.begin_step("m", ["request"])
    box.weights.error = OSError("the link is broken")
    with pytest.raises(OSError, match="broken"), box.gates.closed(output(5)):
        box.forward(NAMES)
    assert WORKER.main.phase == ThreadPhase.SWITCH
    assert all(slot.phase == ThreadPhase.IDLE for slot in WORKER._steps)
    assert box.compilation.static_forward_context is box.layers


def test_another_arrival_is_waited_for_while_one_is_set(box: Box) -> None:
    box.weights.present = box.weights.num_bytes
    other: Any = Weights()
    assert box.gates.are_open
    with box.gates.arriving(other):
        assert not box.gates.are_open
        with box.gates.closed(output(5)):
            box.forward(NAMES)
    assert other.waits == [200, 300, 350]
    assert box.weights.waits == []
    assert box.gates.are_open


def test_layers_are_recorded_once_in_their_order(box: Box) -> None:
    with recorded_calls(box.compilation) as names:
        box.compilation.static_forward_context[NAMES[2]]  # not in a step
        box.forward([NAMES[0], NAMES[0], "model.layers.0.experts", NAMES[1], NAMES[0], NAMES[2]])
    assert names == NAMES
    box.forward(NAMES)
    assert names == NAMES
