"""The self-check: a fixed prompt whose greedy answer shows whether weights have changed.

A pooling model answers with a sample of the numbers of its result, in millionths.

The first self-check of a model decides about *early starts*: turns that begin before all weights of
the model are present. At a load on a device with a link, the order of the model's attention layers
is recorded in the self-check. Gates in this order are then checked: the self-check is repeated
without some of the weights, which come back at the gates. Only a model with the right answers
starts early.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from vllm.model_executor.layers.linear import RowParallelLinear

from gpupoold.errors import Failed
from gpupoold.memory.device import Copy, CopyStream, Device, Direction
from gpupoold.memory.pages import OutOfPages
from gpupoold.memory.transfers import BATCH_BYTES
from gpupoold.memory.weights import WeightMemory
from gpupoold.wire.messages import KvTransfer
from gpupoold.worker.engine.engine import ModelEngine
from gpupoold.worker.engine.late_graphs import SELF_CHECK_TOKENS
from gpupoold.worker.engine.layer_gates import LayerGates, plan_gates, recorded_calls
from gpupoold.worker.engine.steps import Step
from gpupoold.worker.kv.residency import Residency
from gpupoold.worker.threads import finish

# The request's name seeds the prompt, so all workers use the same prompt.
_SELF_CHECK = "self-check"
_NUM_TOKENS = 8
_MAX_STEPS = 64
# Prompts of a verification, and tokens of each answer.
_NUM_VERIFIED = 3
_VERIFIED_TOKENS = 32
# Numbers of a pooling result that are compared, and their largest deviation as a share of the
# largest number: the kernels of two kinds of device differ in the last bits of each sum.
_NUM_SAMPLES = 64
_MAX_DEVIATION = 0.02
_MAX_MILLIONTHS = 10**15

_logger = logging.getLogger(__name__)

# Weights are copied in batches: fewer bytes cannot arrive beside a step.
_MIN_LATE_BYTES = BATCH_BYTES
# Duration of the copies in a slice of the check, while other models' steps wait.
_COPY_S = 0.02

if TYPE_CHECKING:
    import torch


class NoAnswer(Failed):
    """The self-check ended without an answer, which proves nothing about the weights."""


def run_self_check(
    engine: ModelEngine,
    residency: Residency,
    num_tokens: int = _NUM_TOKENS,
    step: Callable[[], list[Step]] | None = None,
    name: str = _SELF_CHECK,
) -> Generator[None, None, tuple[int, ...]]:
    """Return a model's ``num_tokens`` greedy tokens, or its sampled result, for a fixed prompt.

    The request's ``name`` decides on the prompt.

    A slice has one step, made by ``step`` or else by the engine. The model's other requests pause
    meanwhile: in a batch the last bits of a sum may differ. Makes the model resident, so the
    present turn's model must be switched in again.

    Raises:
        NoAnswer: running requests leave no memory, or the answer does not end.
        OutOfPages: the model does not fit even alone.
    """
    num_prompt_tokens, num_tokens = _sizes(engine, num_tokens)
    tokens: list[int] = []
    with engine.only(name):
        engine.add_synthetic(name, num_prompt_tokens, num_tokens)
        for _ in range(_MAX_STEPS):
            yield
            residency.make_resident(engine.name)
            residency.ensure_kv(engine.name)
            for made in (step or engine.whole_steps)():
                if name in made.pooled:
                    return sample_of(made.pooled[name])
                for item in made.progress:
                    tokens += item.new_token_ids
                    if item.finish_reason is not None:
                        return tuple(tokens)
        engine.abort([name])
        engine.kv.discard_dead()
    raise NoAnswer(f"{engine.info.name}: the self-check has no answer after {_MAX_STEPS} steps")


def _sizes(engine: ModelEngine, num_tokens: int) -> tuple[int, int]:
    """Return the lengths of prompt and answer that fit into the model's context."""
    room = engine.info.max_model_len - 1
    num_prompt_tokens = max(1, min(SELF_CHECK_TOKENS, room - _NUM_TOKENS))
    return num_prompt_tokens, max(1, min(num_tokens, room - num_prompt_tokens))


def sample_of(result: torch.Tensor) -> tuple[int, ...]:
    """Return up to 64 evenly spaced numbers of a pooling result, in millionths."""
    numbers = result.detach().flatten().double().nan_to_num()
    step = max(1, numbers.numel() // _NUM_SAMPLES)
    millionths = (numbers[::step][:_NUM_SAMPLES] * 1e6).clamp(-_MAX_MILLIONTHS, _MAX_MILLIONTHS)
    return tuple(round(number) for number in millionths.tolist())


def is_same_answer(
    expected: tuple[int, ...], answered: tuple[int, ...], *, generates: bool
) -> bool:
    """Return whether two self-checks agree: equal tokens, or nearly equal numbers."""
    if generates or len(expected) != len(answered):
        return expected == answered
    limit = _MAX_DEVIATION * max(map(abs, expected), default=0)
    return all(abs(one - other) <= limit for one, other in zip(expected, answered, strict=True))


class SelfCheckFailed(NamedTuple):
    """The tokens of a failed self-check: the model's bytes must be wrong."""

    expected: tuple[int, ...]
    answered: tuple[int, ...]


class SelfChecks:
    """Runs a model's self-check after every ``interval`` loads of its weights (0: never).

    The interval may change at any time.
    """

    def __init__(self, interval: int = 0) -> None:
        self.interval = interval
        self._expected: dict[str, tuple[int, ...]] = {}
        self._num_migrations: dict[str, int] = {}

    def expect(self, model: str, tokens: tuple[int, ...]) -> None:
        """Record the self-check tokens of a newly loaded model."""
        self._expected[model] = tokens
        self._num_migrations[model] = 0

    def forget(self, model: str) -> None:
        self._expected.pop(model, None)
        self._num_migrations.pop(model, None)

    def moved(self, model: str) -> None:
        """Record that weights of the model have been loaded."""
        if model in self._num_migrations:
            self._num_migrations[model] += 1

    def is_due(self, model: str) -> bool:
        """Return whether the self-check is due."""
        if not self.interval or not self._expected.get(model):
            return False
        return self._num_migrations[model] >= self.interval

    def check(self, engine: ModelEngine, residency: Residency) -> SelfCheckFailed | None:
        """Run the self-check of a resident model; return the failure, if any.

        A model without memory for an answer now is checked at its next turn.
        """
        expected = self._expected[engine.name]
        try:
            answered = finish(run_self_check(engine, residency))
        except NoAnswer:
            return None
        self._num_migrations[engine.name] = 0
        if is_same_answer(expected, answered, generates=engine.info.generates):
            return None
        return SelfCheckFailed(expected, answered)


def first_self_check(
    engine: ModelEngine, residency: Residency, device: Device
) -> Generator[None, None, tuple[int, ...]]:
    """Return the answer of a new engine's self-check; let the model start early if possible.

    A slice has one step. Raises as ``run_self_check``.
    """
    if not device.has_link:
        return (yield from run_self_check(engine, residency))
    with recorded_calls(engine.runner.compilation_config) as called:
        answer = yield from run_self_check(engine, residency)
    if engine.weights_id in engine.known_gates:
        engine.start_early(engine.known_gates.pop(engine.weights_id))
    elif (gates := _gates_of(engine, called)) is not None:
        yield from _allow_early_start(engine, residency, device, gates, answer)
    return answer


def verify(engine: ModelEngine, residency: Residency) -> Generator[None, None, str]:
    """Compare answers amid moves with undisturbed answers; return the first difference, if any.

    Undisturbed is an answer of the same engine with the weights resident. The moves are those of
    switches and of migrations: after each token the model leaves the device, or the request leaves
    the engine and comes back with its KV; a pooling model leaves the device before. A slice has one
    step. Raises as ``run_self_check``.
    """
    for number in range(_NUM_VERIFIED):
        name = f"verify-{number}"
        expected = yield from run_self_check(engine, residency, _VERIFIED_TOKENS, name=name)
        for how, move in (("switched out and in", _move_model), ("migrated", _move_request)):
            residency.page_out(engine.name)
            step = partial(_step_and_move, engine, residency, name, list[int](), move)
            answered = yield from run_self_check(
                engine, residency, _VERIFIED_TOKENS, step=step, name=name
            )
            if not is_same_answer(expected, answered, generates=engine.info.generates):
                pairs = enumerate(zip(expected, answered, strict=False))
                at = next((at for at, (one, other) in pairs if one != other), len(answered))
                return f"{how} after each token, the answer to prompt {number} differs at {at}"
    return ""


_Move = Callable[[ModelEngine, Residency, str, list[int]], None]


def _step_and_move(
    engine: ModelEngine, residency: Residency, name: str, tokens: list[int], move: _Move
) -> list[Step]:
    """Run a step, then move; ``tokens`` are the request's so far."""
    made = engine.whole_steps()
    for step in made:
        for item in step.progress:
            tokens += item.new_token_ids
    if not any(step.ended for step in made):
        move(engine, residency, name, tokens)
    return made


def _move_model(engine: ModelEngine, residency: Residency, name: str, tokens: list[int]) -> None:
    residency.page_out(engine.name)


def _move_request(engine: ModelEngine, residency: Residency, name: str, tokens: list[int]) -> None:
    """End a request and add it again with its KV, if its KV alone is enough to go on."""
    computed = engine.computed_kv(name)
    if computed is None or not computed.blocks:
        return
    exported = residency.export(engine.name, computed.blocks, lambda _: None)
    if exported is None:
        return
    slot, transfer = exported
    transfer.wait()
    engine.abort([name])
    engine.kv.settle_exports()
    moved = KvTransfer(name, 0, len(computed.blocks), [], computed.num_tokens)
    sizes = _sizes(engine, _VERIFIED_TOKENS)
    engine.resume_synthetic(name, *sizes, tokens, (slot, moved))


def _allow_early_start(
    engine: ModelEngine,
    residency: Residency,
    device: Device,
    gates: LayerGates,
    expected: tuple[int, ...],
) -> Generator[None, None, None]:
    """Let turns of a model start early, if the model answers right with gates."""
    engine.worker.gates = gates
    limit_bytes = max(1, int(residency.loads.bandwidth_bytes_per_s * _COPY_S))
    ends = [gate.num_bytes for gate in gates.gates]
    stream = device.open_copy_stream(Direction.IN)
    overwrite = partial(engine.overwrite_weights, device)
    try:
        for span in _windows([engine.layer_ends[0], *ends], limit_bytes):
            missing = MissingWeights(engine.weights, stream, overwrite, span)
            if not (yield from _is_right(engine, residency, gates, missing, expected)):
                _logger.warning(
                    "%s: steps begin with all weights present, because a step reads weights of a "
                    "layer before the layers in front have run",
                    engine.info.name,
                )
                engine.worker.gates = None
                return
    finally:
        stream.close()
    engine.start_early(gates)


def _gates_of(engine: ModelEngine, called: Sequence[str]) -> LayerGates | None:
    """Return the gates of a model, None if steps cannot begin early."""
    runner, weights = engine.runner, engine.weights
    config = runner.vllm_config
    if config.model_config.is_encoder_decoder:
        return None
    # A drafter runs after the model, with layers of its own. Slots of adapters follow the weights.
    if runner.get_draft_model() is not None or weights.own_bytes:
        return None
    layers = runner.compilation_config.static_forward_context
    if config.parallel_config.world_size > 1 and not _all_meet(engine, called):
        return None
    calls = [(name, engine.layers.index_of(_module_name(engine, layers[name]))) for name in called]
    gates = plan_gates(calls, engine.layer_ends, weights.num_bytes)
    if not gates or weights.num_bytes - engine.layer_ends[0] < _MIN_LATE_BYTES:
        return None
    return LayerGates(engine.info.name, gates, weights, runner.compilation_config)


def _module_name(engine: ModelEngine, layer: Any) -> str:
    model: nn.Module = engine.runner.get_model()
    return next((name for name, module in model.named_modules() if module is layer), "")


def _all_meet(engine: ModelEngine, called: Sequence[str]) -> bool:
    """Return whether the ranks of a group meet after each attention layer.

    Only the leader has gates, at which all ranks' weights are waited for. Where the projection of
    an attention layer's output adds the parts of all ranks, no other rank can go on to the next
    decoder layer before the leader has passed the gate.
    """
    model: nn.Module = engine.runner.get_model()
    layers = engine.runner.compilation_config.static_forward_context
    for name in called:
        parent = _module_name(engine, layers[name]).rpartition(".")[0]
        # A mixer with a state has its projection inside, attention has its projection beside.
        near = (*layers[name].children(), *model.get_submodule(parent).children())
        projections = [module for module in near if isinstance(module, RowParallelLinear)]
        if not any(
            projection.reduce_results and projection.tp_size > 1 for projection in projections
        ):
            return False
    return True


@dataclass(eq=False)
class MissingWeights:
    """Weights whose bytes are overwritten, and restored from the snapshot when waited for."""

    weights: WeightMemory
    stream: CopyStream
    overwrite: Callable[[range], None]
    span: range

    def __post_init__(self) -> None:
        self._next, self._after = self.span.stop, 0

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        """Overwrite the bytes on all ranks; all are restored at the end of the context."""
        self.overwrite(self.span)
        self._after = self.stream.fence()
        self._next = self.span.start
        try:
            yield
        finally:
            self.wait_for(self.span.stop)

    def wait_for(self, num_bytes: int) -> None:
        """Restore the bytes before ``num_bytes``."""
        count = min(num_bytes, self.span.stop) - self._next
        if count > 0:
            weights, first = self.weights, self._next
            copy = Copy(weights.address + first, weights.snapshot.address + first, count)
            # After the fence only, because the step is under way on the other ranks.
            self.stream.wait(self.stream.begin([copy], self._after))
            self._next += count


def _windows(ends: Sequence[int], limit_bytes: int) -> Iterator[range]:
    """Cut the bytes from the first to the last of ``ends`` at ``ends``.

    Ranges are as long as possible within ``limit_bytes``, or go to the next end.
    """
    start, stop = ends[0], ends[0]
    for end in ends[1:]:
        if end - start > limit_bytes and stop > start:
            yield range(start, stop)
            start = stop
        stop = end
    if stop > start:
        yield range(start, stop)


def _is_right(
    engine: ModelEngine,
    residency: Residency,
    gates: LayerGates,
    missing: MissingWeights,
    expected: tuple[int, ...],
) -> Generator[None, None, bool]:
    """Return whether the first token is right although weights are missing until their gates."""

    def step() -> list[Step]:
        with missing.removed(), gates.arriving(missing):
            return engine.whole_steps()

    generates = engine.info.generates
    try:
        answered = yield from run_self_check(engine, residency, num_tokens=1, step=step)
    except (NoAnswer, OutOfPages):
        return False
    return is_same_answer(expected[:1] if generates else expected, answered, generates=generates)
