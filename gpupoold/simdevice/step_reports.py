"""Reports of a simulated device's steps: steps of an unchanged batch share a message if late."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpupoold.sim.live import SimLive
from gpupoold.simdevice.synthetic import Vocabulary, seed_of
from gpupoold.wire import messages as m

LENGTH = "length"


@dataclass(slots=True)
class _Steps:
    """Unreported steps of one batch; ``starts`` are the numbers of tokens before the steps."""

    model: str
    batch: list[SimLive]
    starts: list[int]
    num_steps: int
    step_s: float | None


class StepReports:
    """Collects steps and reports them when the batch changes, or at ``close``."""

    def __init__(
        self, send: Callable[[m.Message], None], vocabularies: Mapping[str, Vocabulary]
    ) -> None:
        self._send = send
        self._vocabularies = vocabularies
        self._steps: _Steps | None = None

    def note(self, model: str, batch: list[SimLive], step_s: float | None, now_s: float) -> None:
        """Add a step with a token for each request; ``step_s`` is None for a prefill."""
        steps = self._steps
        is_decode = step_s is not None and steps is not None and steps.step_s is not None
        if steps is not None and is_decode and steps.batch == batch:
            steps.num_steps += 1
            steps.step_s = step_s
            return
        self.close(now_s)
        self._steps = _Steps(model, batch, [one.num_tokens - 1 for one in batch], 1, step_s)

    def end(self, live: SimLive, now_s: float) -> None:
        """Report the end of a request, unless the collected steps already contain the end."""
        if self._steps is None or live not in self._steps.batch:
            self.note(live.request.model, [live], None, now_s)

    def close(self, now_s: float) -> None:
        """Report the collected steps."""
        steps, self._steps = self._steps, None
        if steps is None:
            return
        vocabulary, num_steps = self._vocabularies[steps.model], steps.num_steps
        progress = [
            m.RequestProgress(
                one.request.id,
                vocabulary.token_ids(seed_of(one.request.id), start, num_steps),
                LENGTH if start + num_steps - one.num_before >= one.request.output_tokens else None,
            )
            for one, start in zip(steps.batch, steps.starts, strict=True)
        ]
        self._send(m.StepOutputs(steps.model, now_s, [], progress, steps.step_s))
