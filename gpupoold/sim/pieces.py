"""Pieces of a device's work: segments of decode steps, and chunks of prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gpupoold.latency.models import LatencyModel
from gpupoold.sim.live import SimLive


@dataclass(slots=True)
class StepSegment:
    """Decode steps of an unchanged batch from ``start_s``, equally long."""

    batch: list[SimLive]
    start_s: float
    step_s: float
    num_steps: int

    @property
    def end_s(self) -> float:
        return self.start_s + self.num_steps * self.step_s

    def token_times_s(self) -> list[float]:
        """Return the time of each step."""
        start_s, step_s = self.start_s, self.step_s
        return [start_s + k * step_s for k in range(1, self.num_steps + 1)]

    def leave(self, live: SimLive, now_s: float) -> int:
        """Remove a request; add the tokens of past steps to the request, return the number."""
        self.batch.remove(live)
        past_s = [at_s for at_s in self.token_times_s()[:-1] if at_s <= now_s]
        live.token_times_s += past_s
        return len(past_s)

    def cut(self, act_s: float) -> bool:
        """End at the first step boundary not before ``act_s``; return whether that is earlier."""
        steps = max(1, math.ceil((act_s - self.start_s) / self.step_s))
        if steps >= self.num_steps:
            return False
        self.num_steps = steps
        return True


def segment_of(
    batch: list[SimLive], latency: LatencyModel, now_s: float, end_s: float, max_steps: int
) -> StepSegment:
    """Return a segment from ``now_s`` to the first step boundary not before ``end_s``.

    The segment is shorter if a request ends earlier, or at ``max_steps``.
    """
    size, context, num_steps = len(batch), 0, max_steps
    for live in batch:  # the simulator's innermost loop
        request, num_made = live.request, len(live.token_times_s)
        context += request.prompt_tokens + num_made
        num_left = request.output_tokens - num_made
        if num_left < num_steps:
            num_steps = num_left
    if end_s < math.inf:
        left_s = max(end_s - now_s, 0.0)
        step_s = latency.decode_step_s(size, context)
        num_steps = min(num_steps, max(1, math.ceil(left_s / step_s)))
    # Steps take longer as the context grows, linearly: the duration of the middle step is the mean.
    step_s = latency.decode_step_s(size, context + size * (num_steps - 1) // 2)
    return StepSegment(batch, now_s, step_s, num_steps)


def chunks_of(
    waiting: Iterable[SimLive], chunk_tokens: int, num_running: int
) -> list[tuple[SimLive, int]]:
    """Return the prompts of a step, each with the number of tokens to prefill.

    The oldest prompt comes first, as in vLLM. At least one token is prefilled, because prompts
    would starve where the answers alone fill the step.
    """
    left = max(1, chunk_tokens - num_running)
    chunks: list[tuple[SimLive, int]] = []
    for live in waiting:
        num_tokens = min(left, live.prefill_tokens - live.done_tokens)
        chunks.append((live, num_tokens))
        left -= num_tokens
        if not left:
            break
    return chunks
