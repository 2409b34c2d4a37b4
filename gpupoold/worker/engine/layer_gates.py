"""Gates before the decoder layers of a step that began before all weights were present.

Attention layers run outside of compiled code and of CUDA graphs for prompts: vLLM calls a Python
function, which finds the layer in the forward context's dictionary of layers
(``CompilationConfig.static_forward_context``). A gate is a look-up in this dictionary: at each
attention layer the step waits for the weights of the next decoder layer, at the last attention
layer for all weights. Other steps use the plain dictionary.

A graph of a whole step has no gates, so such a step waits for all weights before it begins.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.forward_context import is_forward_context_available
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core.sched.output import SchedulerOutput

from gpupoold.memory.weights import WeightMemory
from gpupoold.system.activity import WORKER, ThreadPhase


class LayerGate(NamedTuple):
    """A gate at an attention layer; ``num_bytes`` of weights are present behind the gate."""

    name: str
    num_bytes: int


class ArrivingWeights(Protocol):
    """Weights on their way to the device."""

    def wait_for(self, num_bytes: int) -> None:
        """Return when the first ``num_bytes`` are present."""


class WrongOrder(RuntimeError):
    """A step used layers in another order than the order of the gates."""


def plan_gates(
    calls: Sequence[tuple[str, int | None]], layer_ends: Sequence[int], num_bytes: int
) -> tuple[LayerGate, ...]:
    """Return the gates of a model of ``num_bytes``, none if steps cannot begin early.

    ``calls`` has the attention layers in the order of a step, each with its decoder layer.
    Every decoder layer must have attention, and the layers must run in ascending order.
    """
    layers = [layer for _, layer in calls]
    numbers = [layer for layer in layers if layer is not None]
    if len(numbers) < len(layers) or numbers != sorted(numbers):
        return ()
    if len(layer_ends) < 2 or set(numbers) != set(range(len(layer_ends))):
        return ()
    needed = [layer_ends[following] for _, following in pairwise(numbers)]
    return tuple(
        LayerGate(name, end) for (name, _), end in zip(calls, [*needed, num_bytes], strict=True)
    )


@contextlib.contextmanager
def recorded_calls(compilation: CompilationConfig) -> Iterator[list[str]]:
    """Yield a list that gets the names of attention layers at their first use in the context."""
    names: list[str] = []

    def record(name: str) -> None:
        if name not in names:
            names.append(name)

    with _looked_up(compilation, record):
        yield names


@dataclass(eq=False)
class LayerGates:
    """The gates of a model, closed while the model's weights arrive."""

    model: str
    gates: tuple[LayerGate, ...]
    weights: WeightMemory
    compilation: CompilationConfig
    clock: Callable[[], float] = time.monotonic
    _num_passed: int = field(default=0, init=False)
    _waited_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._arrival: ArrivingWeights = self.weights

    @property
    def are_open(self) -> bool:
        """True if all weights are present, so that steps need no gates."""
        return self.weights.is_resident and self._arrival is self.weights

    def take_waited_s(self) -> float:
        """Return the seconds that steps have waited at gates since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    @contextlib.contextmanager
    def arriving(self, arrival: ArrivingWeights) -> Iterator[None]:
        """Let steps inside the context wait for ``arrival`` instead of the weights."""
        self._arrival = arrival
        try:
            yield
        finally:
            self._arrival = self.weights

    @contextlib.contextmanager
    def closed(self, output: SchedulerOutput) -> Iterator[None]:
        """Guard the step of ``output`` inside the context.

        Raises:
            WrongOrder: the step did not pass all gates in their order.
            Exception: a copy of weights failed.
        """
        if not self._has_gates(output):
            self._wait_for(self.weights.num_bytes)
            yield
            return
        self._num_passed = 0
        with _looked_up(self.compilation, self._pass):
            yield
        if self._num_passed < len(self.gates):
            raise WrongOrder(f"{self.model}: a step passed {self._num_passed} of its gates")

    def _has_gates(self, output: SchedulerOutput) -> bool:
        """Return whether attention runs in Python in this step."""
        mode = self.compilation.cudagraph_mode or CUDAGraphMode.NONE
        if mode.mixed_mode() is CUDAGraphMode.FULL:
            return False
        if mode.decode_mode() is not CUDAGraphMode.FULL:
            return True
        return any(num_tokens > 1 for num_tokens in output.num_scheduled_tokens.values())

    def _pass(self, name: str) -> None:
        position = self._num_passed
        if position and self.gates[position - 1].name == name:
            return  # a layer is looked up for its KV, and again for attention
        if position == len(self.gates) or self.gates[position].name != name:
            raise WrongOrder(f"{self.model}: {name} is not the attention layer {position}")
        self._wait_for(self.gates[position].num_bytes)
        self._num_passed += 1

    def _wait_for(self, num_bytes: int) -> None:
        began_s = self.clock()
        try:
            self._arrival.wait_for(num_bytes)
        except (
            BaseException
        ):  # ends the worker, as a failed switch, for which no request is to blame
            WORKER.end_steps()
            WORKER.main.set(ThreadPhase.SWITCH, self.model)
            raise
        self._waited_s += self.clock() - began_s


class _Layers(dict[str, Any]):
    """vLLM's layers by name, which tells ``on_use`` of uses of attention layers in steps."""

    def __init__(self, layers: dict[str, Any], on_use: Callable[[str], None]) -> None:
        super().__init__(layers)
        self._on_use = on_use

    def __getitem__(self, name: str) -> Any:
        layer = super().__getitem__(name)
        # Outside of a forward context, vLLM prepares the states of Mamba layers, in any order.
        if isinstance(layer, AttentionLayerBase) and is_forward_context_available():
            self._on_use(name)
        return layer


@contextlib.contextmanager
def _looked_up(compilation: CompilationConfig, on_use: Callable[[str], None]) -> Iterator[None]:
    plain = compilation.static_forward_context
    compilation.static_forward_context = _Layers(plain, on_use)
    try:
        yield
    finally:
        compilation.static_forward_context = plain
