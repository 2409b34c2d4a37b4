"""An engine's steps: one after the other, or each prepared while the device computes another.

With vLLM's asynchronous scheduling (its default on a GPU) a step is scheduled and launched
before the tokens of the one before it are known: they stay on the device. The device then never
waits for the host. What has been launched is *under way* until its tokens have come; whoever
wants to end requests or to take memory away settles it first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.worker import workspace

from gpupoold.wire.messages import RequestProgress


class Step(NamedTuple):
    """What a step has made: encoded outputs for the frontend (maybe none), and their gist."""

    frames: list[bytes]
    progress: list[RequestProgress]
    is_decode: bool
    """It was the next token of every request in it: no prompt was computed."""


class EngineSteps:
    """Makes the steps of ``core``, whose scheduler is a :class:`PooledScheduler`."""

    def __init__(self, core: EngineCore) -> None:
        self._core: Any = core
        self._scheduler: Any = core.scheduler
        self._workspace = workspace._manager
        self._encoder = MsgpackEncoder()
        self._made: list[Step] = []

    @property
    def are_under_way(self) -> bool:
        """Whether something has been launched whose tokens have not come."""
        return bool(self._core.batch_queue)

    def begin(self, chunk_tokens: int | None = None) -> list[Step]:
        """Launch a step, of ``chunk_tokens`` at most; then wait for the one before it.

        Returns what has come since the last call: nothing when none was under way before.
        Without asynchronous scheduling it is the step itself that is waited for.
        """
        self._scheduler.chunk_tokens = chunk_tokens
        self._call()
        return self._take()

    def settle(self) -> list[Step]:
        """Return when nothing is under way, with what has come since the last call."""
        self.wait()
        return self._take()

    def wait(self) -> None:
        """Return when nothing is under way; the next call of the others has what has come."""
        if not self.are_under_way:
            return
        self._scheduler.is_held = True
        try:
            while self.are_under_way:
                self._call()
        finally:
            self._scheduler.is_held = False

    def close(self) -> None:
        """Let go of the engine."""
        self._core = self._scheduler = None
        self._workspace = workspace._manager = None

    def _call(self) -> None:
        # vLLM has one scratch manager per process and makes a new one for each engine on a GPU,
        # while CUDA graphs keep addresses in the one they were captured with.
        workspace._manager = self._workspace
        num_updates = self._scheduler.num_updates
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        if self._scheduler.num_updates > num_updates:
            self._made.append(self._told((outputs or {}).get(0)))

    def _told(self, result: EngineCoreOutputs | None) -> Step:
        is_decode = bool(self._scheduler.was_decode)
        if result is None or not result.outputs:
            return Step([], [], is_decode)
        progress = [
            RequestProgress(
                output.request_id,
                list(output.new_token_ids),
                str(output.finish_reason) if output.finish_reason is not None else None,
            )
            for output in result.outputs
        ]
        frames: Any = self._encoder.encode(result)
        return Step([bytes(frame) for frame in frames], progress, is_decode)

    def _take(self) -> list[Step]:
        made, self._made = self._made, []
        return made
