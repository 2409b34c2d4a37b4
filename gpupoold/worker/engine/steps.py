"""An engine's steps, sequential or overlapped.

With vLLM's asynchronous scheduling (the default on a GPU) a step is scheduled and launched before
the tokens of the previous step are known: the tokens stay on the device, and the device never waits
for the host. A launched step is *under way* until its tokens have arrived. Code that ends requests
or takes memory away must settle the step first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.worker import workspace

from gpupoold.system.activity import WORKER
from gpupoold.wire.channel import MAX_FRAME_BYTES
from gpupoold.wire.messages import DraftCounts, RequestProgress
from gpupoold.worker.engine.grammars import GrammarRefusal

_MAX_STEP_BYTES = MAX_FRAME_BYTES // 2
"""Limit in bytes of encoded outputs in one message, which also has the token ids."""


class Step(NamedTuple):
    """The result of a step: encoded outputs for the frontends (maybe none), and a summary."""

    frames: list[bytes]
    progress: list[RequestProgress]
    is_decode: bool
    """True if every request got its next token, without any prefill."""
    frame_counts: dict[int, int]
    """Number of ``frames`` per frontend, in the order of the frames."""
    ended: Sequence[str] = ()
    """Ids of requests that have ended."""
    pooled: Mapping[str, torch.Tensor] = MappingProxyType({})
    """Results of pooling requests by id."""
    drafts: DraftCounts | None = None
    """Speculative decoding since the previous step with drafts."""


class EngineSteps:
    """Makes the steps of ``core``, whose scheduler is a :class:`PooledScheduler`.

    The requests of a step are written to the activity page for as long as the step can end the
    process; ``name`` is the model's name.
    """

    def __init__(self, core: EngineCore, name: str = "") -> None:
        self.name = name
        self._core: Any = core
        self._scheduler: Any = core.scheduler
        self._workspace = workspace._manager
        self._encoder = MsgpackEncoder()
        self._made: list[Step] = []
        self._refused: dict[str, GrammarRefusal] = {}
        self._ending: set[str] = set()  # refused, and perhaps not ended yet

    @property
    def are_under_way(self) -> bool:
        """True if a launched step's tokens have not arrived."""
        return bool(self._core.batch_queue)

    def begin(self, chunk_tokens: int | None = None) -> list[Step]:
        """Launch a step of at most ``chunk_tokens``; then wait for the previous step.

        ``chunk_tokens`` counts prompt tokens, and each answer's token and draft.
        Returns the results since the last call: none without a previous step. Without asynchronous
        scheduling, and while a request is isolated, the call waits for the step itself.
        """
        self._scheduler.chunk_tokens = chunk_tokens
        if not self._scheduler.isolated:
            self._call()
            return self.take()
        self.wait()
        self._scheduler.take_turns(may_isolate=WORKER.is_alone)
        self._call()
        self.wait()
        return self.take()

    def settle(self) -> list[Step]:
        """Wait for launched steps; return the results since the last call."""
        self.wait()
        return self.take()

    def take(self) -> list[Step]:
        """Return the results since the last call, without waiting."""
        made, self._made = self._made, []
        return made

    def take_refused(self) -> dict[str, GrammarRefusal]:
        """Return the requests to be ended for their grammar since the last call.

        No step's result has any of the requests.
        """
        if not self._refused:
            return {}
        refused, self._refused = self._refused, {}
        return refused

    def wait(self) -> None:
        """Wait for launched steps; the next ``begin`` or ``settle`` returns the results."""
        if not self.are_under_way:
            return
        self._scheduler.is_held = True
        try:
            while self.are_under_way:
                self._call()
        finally:
            self._scheduler.is_held = False

    def close(self) -> None:
        """Drop the references to the engine."""
        self._core = self._scheduler = None
        self._workspace = workspace._manager = None

    def _call(self) -> None:
        # vLLM has one workspace manager per process. A new engine on a GPU replaces the manager,
        # but CUDA graphs keep addresses in the workspace of their capture.
        workspace._manager = self._workspace
        num_updates = self._scheduler.num_updates
        WORKER.begin_scheduling(self.name)
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        refused = self._core.structured_output_manager.take_refused()
        if refused or self._ending:
            outputs = self._without_refused(refused, outputs or {})
        if self._scheduler.num_updates > num_updates:
            made = (outputs or {}).items()
            reported = {number: result for number, result in made if result.outputs}
            steps = self._steps_of(reported, is_decode=bool(self._scheduler.was_decode))
            if reported and (drafts := self._scheduler.take_drafts()) is not None:
                steps[0] = steps[0]._replace(drafts=drafts)
            self._made += steps
        WORKER.end_steps(len(self._core.batch_queue or ()))

    def _without_refused(
        self, refused: dict[str, GrammarRefusal], outputs: dict[int, EngineCoreOutputs]
    ) -> dict[int, EngineCoreOutputs]:
        """Take requests out of a step's outputs whose last tokens no grammar has constrained."""
        self._refused |= refused
        ending = self._ending | refused.keys()
        self._ending = {key for key in ending if key in self._scheduler.requests}
        return {
            number: msgspec.structs.replace(
                made, outputs=[output for output in made.outputs if output.request_id not in ending]
            )
            for number, made in outputs.items()
        }

    def _steps_of(
        self, by_frontend: dict[int, EngineCoreOutputs], *, is_decode: bool
    ) -> list[Step]:
        """Return a step's results, as several steps if one message would be too long."""
        frames: list[bytes] = []
        progress: list[RequestProgress] = []
        frame_counts: dict[int, int] = {}
        ended: list[str] = []
        pooled: dict[str, torch.Tensor] = {}
        for number, result in by_frontend.items():
            encoded: Any = self._encoder.encode(result)
            frames += [bytes(frame) for frame in encoded]
            frame_counts[number] = len(encoded)
            for output in result.outputs:
                name, tokens = output.request_id, output.new_token_ids
                reason, tensor = output.finish_reason, output.pooling_output
                prefill = output.prefill_stats
                if reason is None and tensor is None and prefill is None:  # the usual case
                    progress.append(RequestProgress(name, tokens))
                    continue
                if tensor is not None:
                    pooled[name] = tensor
                if reason is not None:
                    ended.append(name)
                reason_text = None if reason is None else str(reason)
                num_cached = None if prefill is None else prefill.num_cached_tokens
                has_result = tensor is not None
                progress.append(RequestProgress(name, tokens, reason_text, has_result, num_cached))
        if len(progress) > 1 and sum(map(len, frames)) > _MAX_STEP_BYTES:
            halves = _halves(by_frontend)
            return [step for half in halves for step in self._steps_of(half, is_decode=False)]
        return [Step(frames, progress, is_decode, frame_counts, ended, pooled)]


def _halves(by_frontend: dict[int, EngineCoreOutputs]) -> tuple[dict[int, EngineCoreOutputs], ...]:
    """Split the outputs of a step into two parts, both with outputs."""
    pairs = [(number, output) for number, made in by_frontend.items() for output in made.outputs]
    middle = len(pairs) // 2
    halves = []
    for half in (pairs[:middle], pairs[middle:]):
        outputs: dict[int, list[EngineCoreOutput]] = {}
        for number, output in half:
            outputs.setdefault(number, []).append(output)
        halves.append(
            {
                number: msgspec.structs.replace(by_frontend[number], outputs=part)
                for number, part in outputs.items()
            }
        )
    return tuple(halves)
