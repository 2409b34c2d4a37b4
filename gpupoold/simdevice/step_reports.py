"""Reports of a simulated device's steps: late steps of an unchanged batch share a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpupoold.simdevice.answers import Answer
from gpupoold.simdevice.synthetic import Vocabulary, seed_of
from gpupoold.wire import messages as m

LENGTH = "length"


@dataclass(slots=True)
class _Steps:
    """Unreported steps of one batch."""

    model: str
    batch: tuple[Answer, ...]
    num_steps: int
    step_s: float | None


class StepReports:
    """Collects steps and reports them when the batch changes, or at ``close``."""

    def __init__(
        self, send: Callable[[m.Message], None], vocabulary_of: Callable[[str], Vocabulary]
    ) -> None:
        self._send = send
        self._vocabulary_of = vocabulary_of
        self._steps: _Steps | None = None

    def note(
        self, model: str, batch: tuple[Answer, ...], step_s: float | None, now_s: float
    ) -> None:
        """Add a step; ``step_s`` is None for a prefill."""
        steps = self._steps
        if steps is not None and steps.batch is batch and step_s is not None:
            steps.num_steps += 1
            steps.step_s = step_s
            return
        self.close(now_s)
        self._steps = _Steps(model, batch, 1, step_s)

    def close(self, now_s: float) -> None:
        """Report the collected steps."""
        steps, self._steps = self._steps, None
        if steps is None:
            return
        vocabulary = self._vocabulary_of(steps.model)
        progress = [
            m.RequestProgress(
                one.request_id,
                vocabulary.token_ids(
                    seed_of(one.request_id), one.num_tokens - steps.num_steps, steps.num_steps
                ),
                LENGTH if one.is_done else None,
            )
            for one in steps.batch
        ]
        self._send(m.StepOutputs(steps.model, now_s, [], progress, steps.step_s))
