"""The self-check: a fixed prompt whose greedy answer shows whether weights have changed.

A pooling model answers with a sample of the numbers of its result, in millionths.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, NamedTuple

from gpupoold.errors import Failed
from gpupoold.worker.engine.engine import ModelEngine
from gpupoold.worker.engine.steps import Step
from gpupoold.worker.kv.residency import Residency
from gpupoold.worker.turn_thread import finish

# The request's name seeds the prompt, so all workers use the same prompt.
_SELF_CHECK = "self-check"
_NUM_PROMPT_TOKENS = 16
_NUM_TOKENS = 8
_MAX_STEPS = 64
# Numbers of a pooling result that are compared, and their largest deviation as a share of the
# largest number: the kernels of two kinds of device differ in the last bits of each sum.
_NUM_SAMPLES = 64
_MAX_DEVIATION = 0.02
_MAX_MILLIONTHS = 10**15

if TYPE_CHECKING:
    import torch


class NoAnswer(Failed):
    """The self-check ended without an answer, which proves nothing about the weights."""


def run_self_check(
    engine: ModelEngine,
    residency: Residency,
    num_tokens: int = _NUM_TOKENS,
    step: Callable[[], list[Step]] | None = None,
) -> Generator[None, None, tuple[int, ...]]:
    """Return a model's ``num_tokens`` greedy tokens, or its sampled result, for a fixed prompt.

    A slice has one step, made by ``step`` or else by the engine. The model's other requests pause
    meanwhile: in a batch the last bits of a sum may differ. Makes the model resident, so the
    present turn's model must be switched in again.

    Raises:
        NoAnswer: running requests leave no memory, or the answer does not end.
        OutOfPages: the model does not fit even alone.
    """
    room = engine.info.max_model_len - 1
    num_prompt_tokens = max(1, min(_NUM_PROMPT_TOKENS, room - _NUM_TOKENS))
    num_tokens = max(1, min(num_tokens, room - num_prompt_tokens))
    tokens: list[int] = []
    with engine.only(_SELF_CHECK):
        engine.add_synthetic(_SELF_CHECK, num_prompt_tokens, num_tokens)
        for _ in range(_MAX_STEPS):
            yield
            residency.make_resident(engine.name)
            residency.ensure_kv(engine.name)
            for made in (step or engine.whole_steps)():
                if _SELF_CHECK in made.pooled:
                    return sample_of(made.pooled[_SELF_CHECK])
                for item in made.progress:
                    tokens += item.new_token_ids
                    if item.finish_reason is not None:
                        return tuple(tokens)
        engine.abort([_SELF_CHECK])
        engine.kv.discard_dead()
    raise NoAnswer(f"{engine.info.name}: the self-check has no answer after {_MAX_STEPS} steps")


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

    def __init__(self, interval: int) -> None:
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
