"""Conversations: requests whose prompts begin with the turns before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from gpupoold.errors import UsageError
from gpupoold.sim.lengths import sharegpt_lengths
from gpupoold.sim.scenario import Draw, DrawnWorkload, WithoutFile
from gpupoold.sim.workloads import SimRequest, in_arrival_order, model_names


@dataclass(frozen=True, slots=True)
class Conversations(WithoutFile):
    """Poisson beginnings of conversations, equal for all models, of ``num_turns`` each in the mean.

    A further turn comes after a pause of ``pause_s`` in the mean, whenever the turn before is
    answered, and has the history, which ends at ``max_tokens``, and new text before. The text of a
    user and of an answer have ShareGPT's lengths. ``rps`` of a draw is the rate of turns.
    """

    num_turns: float = 6.0
    pause_s: float = 60.0
    max_tokens: int = 16_384

    def draw(self, draw: Draw) -> DrawnWorkload:
        """Raise UsageError without a number of models, a rate and a duration."""
        if draw.num_models is None or draw.rps is None or draw.duration_s is None:
            raise UsageError("conversations need a number of models, a rate and a duration")
        names = tuple(model_names(draw.num_models))
        streams = (self._stream(name, draw.rps, draw.duration_s, draw.seed) for name in names)
        requests = in_arrival_order(request for stream in streams for request in stream)
        return DrawnWorkload(requests, names, draw.duration_s)

    def _stream(self, model: str, rps: float, duration_s: float, seed: int) -> Iterator[SimRequest]:
        """Yield the turns of one model's conversations; conversations have begun before the run."""
        rng, lengths = Random(f"{seed}/{model}/conversations"), sharegpt_lengths()
        number, begin_s = 0, -self.num_turns * self.pause_s
        while True:
            begin_s += rng.expovariate(rps / self.num_turns)
            if begin_s >= duration_s:
                return
            number, at_s, history_tokens = number + 1, begin_s, 0
            while True:
                prompt_tokens, output_tokens = lengths.sample(rng)
                whole = history_tokens + prompt_tokens
                if whole + output_tokens > self.max_tokens:
                    break
                if 0 <= at_s < duration_s:
                    name = f"c{number}"
                    yield SimRequest("", model, at_s, whole, output_tokens, name, history_tokens)
                history_tokens = whole + output_tokens
                at_s += rng.expovariate(1 / self.pause_s)
                if rng.random() < 1 / self.num_turns:
                    break
