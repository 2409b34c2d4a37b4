"""The steps of a turn: start, wait, and report with duration."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpupoold.domain import FinalFailure
from gpupoold.system.activity import WORKER
from gpupoold.wire import messages as m
from gpupoold.wire.channel import FrameTooLong
from gpupoold.worker.engine.engine import ModelEngine
from gpupoold.worker.engine.steps import Step
from gpupoold.worker.turns.ledger import RequestLedger

# Outputs of fewer bytes are sent without a record on the activity page: no lack of memory ends the
# worker just then.
_RECORDED_BYTES = 1 << 20


def may_come_between(message: m.ToWorker) -> bool:
    """Return whether a message leaves residency and running requests unchanged.

    Such a message may be handled while a step is under way.
    """
    if isinstance(message, m.AddRequest):
        return not message.output_token_ids and not message.is_isolated
    harmless = m.RunTurn | m.EndTurn | m.SetTargets | m.ReleaseKvTransfer | m.Reconfigure
    return isinstance(message, harmless)


@dataclass(eq=False, slots=True)
class TurnSteps:
    """The steps of the present model; ``send`` sends a message to the daemon."""

    ledger: RequestLedger
    send: Callable[[m.StepOutputs], None]
    clock: Callable[[], float] = time.monotonic
    num_begun: int = field(default=0, init=False)
    _engine: ModelEngine | None = field(default=None, init=False)
    """May have a launched step."""
    _since_s: float = field(default=0.0, init=False)
    """Start of the device's present step."""
    _last_s: float = field(default=0.0, init=False)
    """Duration of the step before."""
    _unsendable: list[m.RequestsFailed] = field(default_factory=list, init=False)

    def begin(self, engine: ModelEngine, chunk_tokens: int | None) -> bool:
        """Start a step and report the previous one; return whether the engine still has
        requests.
        """
        steps = engine.steps
        if not steps.are_under_way:
            if ended_elsewhere := steps.take():
                self._report(engine, ended_elsewhere)
            self._since_s = self.clock()
        self._engine = engine
        self.num_begun += 1
        made = steps.begin(chunk_tokens)
        self._report(engine, made)
        has_told = bool(self._unsendable) or any(step.frames for step in made)
        return has_told or steps.are_under_way or engine.has_requests()

    def expected_end_s(self) -> float:
        """Return the expected end of the present step.

        The present step is expected to take as long as the previous step.
        """
        return self._since_s + self._last_s

    def settle(self) -> None:
        """Wait for launched steps and report all results."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._report(engine, engine.steps.settle())

    def take_unsendable(self) -> list[m.RequestsFailed]:
        """Return requests to be ended and reported: their outputs were too long for a message, or
        their grammars took more CPU time than they may.
        """
        taken, self._unsendable = self._unsendable, []
        return taken

    def _report(self, engine: ModelEngine, steps: Sequence[Step]) -> None:
        for request_id, refusal in engine.steps.take_refused().items():
            failed = m.RequestsFailed(
                engine.name,
                [request_id],
                refusal.reason,
                code=FinalFailure.GRAMMAR if refusal.is_final else "",
                grammar=refusal.digest,
            )
            self._unsendable.append(failed)
        # The duration of a step that has waited for weights says nothing about other steps.
        has_waited = bool(steps) and engine.take_waited_s() > 0
        for step in steps:
            ended_s = self.clock()
            # Steps follow each other on the device: a step begins when the previous step ends.
            step_s = ended_s - self._since_s
            self._since_s = ended_s
            if not has_waited:
                self._last_s = step_s
            self.ledger.finish(engine.name, step.ended)
            if step.frames:
                outputs = m.StepOutputs(
                    engine.name,
                    ended_s,
                    step.frames,
                    step.progress,
                    step_s / _tokens_each(step) if step.is_decode and not has_waited else None,
                    step.frame_counts,
                    step.drafts,
                )
                if sum(map(len, step.frames)) < _RECORDED_BYTES:
                    self.send(outputs)
                else:
                    self._send_long(outputs)

    def _send_long(self, outputs: m.StepOutputs) -> None:
        ids = [item.request_id for item in outputs.progress]
        WORKER.begin_report(outputs.model, ids)
        try:
            self.send(outputs)
        except FrameTooLong as error:
            self._unsendable.append(m.RequestsFailed(outputs.model, ids, str(error)))
        WORKER.end_report()


def _tokens_each(step: Step) -> float:
    """Return the mean number of tokens that an answer gained: more than 1 with accepted drafts."""
    if step.drafts is None:
        return 1.0
    counts = [len(item.new_token_ids) for item in step.progress if item.new_token_ids]
    return sum(counts) / len(counts) if counts else 1.0
