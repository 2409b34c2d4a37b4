"""The requests of a simulated device, by model and by state."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from gpupoold.domain import Targets
from gpupoold.sim.workloads import SimRequest


@dataclass(slots=True, eq=False)
class SimLive:
    """A request on a device, with the times of its tokens so far.

    ``done_tokens`` counts prefilled tokens during chunked prefill. ``num_repeated`` tokens of the
    answer are prefilled with the prompt, after a migration without KV. An answer begun by
    another process is represented by a longer prompt and fewer output tokens; ``num_before`` is the
    number of earlier tokens, for deadlines. ``cached_tokens`` of the prompt need no prefill.
    """

    request: SimRequest
    token_times_s: list[float] = field(default_factory=list)
    done_tokens: int = 0
    num_before: int = 0
    num_repeated: int = 0
    cached_tokens: int = 0

    @property
    def prefill_tokens(self) -> int:
        """Number of tokens to prefill before the next token."""
        return self.request.prompt_tokens + self.num_repeated

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the whole answer so far."""
        return self.num_before + len(self.token_times_s)

    @property
    def num_left(self) -> int:
        return self.request.output_tokens - len(self.token_times_s)

    @property
    def context_tokens(self) -> int:
        return self.request.prompt_tokens + len(self.token_times_s)


@dataclass(slots=True)
class DeviceTally:
    """Counts of a device's work, in steps, bytes and seconds.

    ``busy_s`` and ``switch_s`` count the work until ``counted_until_s``; the other fields count all
    work. Loads that fill a device before its first eviction are not ``switches``.
    """

    counted_until_s: float = math.inf
    turns: int = 0
    steps: int = 0
    switches: int = 0
    moved_bytes: int = 0
    switch_s: float = 0.0
    busy_s: float = 0.0

    def add_work(self, begin_s: float, duration_s: float) -> None:
        """Count a piece of work from ``begin_s``."""
        self.busy_s += self._counted_s(begin_s, duration_s)

    def add_switch(self, begin_s: float, duration_s: float) -> None:
        """Count the time of a switch from ``begin_s``."""
        self.switch_s += self._counted_s(begin_s, duration_s)

    def _counted_s(self, begin_s: float, duration_s: float) -> float:
        return min(duration_s, max(0.0, self.counted_until_s - begin_s))


class DeviceRequests:
    """The requests of a device, by state.

    ``waiting``: without a first token, by model; ``running``: being decoded, by model;
    ``prefilling``: the request in an unchunked prefill; ``attaching``: with KV on the way from
    host memory.
    """

    def __init__(self) -> None:
        self.waiting: defaultdict[str, list[SimLive]] = defaultdict(list)
        self.running: defaultdict[str, list[SimLive]] = defaultdict(list)
        self.attaching: list[SimLive] = []
        self.prefilling: SimLive | None = None

    def has_work(self, model: str) -> bool:
        return bool(self.waiting[model] or self.running[model])

    def unprefilled(self, model: str) -> list[SimLive]:
        """Return the requests of a model without a first token."""
        first = self.prefilling
        prefilling = (first,) if first is not None and first.request.model == model else ()
        return [*prefilling, *self.waiting[model]]

    def present(self, model: str) -> list[SimLive]:
        """Return the requests of a model, except attaching requests."""
        return [*self.unprefilled(model), *self.running[model]]

    def all(self, model: str) -> list[SimLive]:
        """Return all requests of a model."""
        attaching = (request for request in self.attaching if request.request.model == model)
        return [*self.present(model), *attaching]

    def recompute(self, model: str) -> None:
        """Let a model's requests, whose KV is gone, wait for a prefill again; answers first."""
        for live in self.running[model]:
            live.num_repeated = len(live.token_times_s)
        self.waiting[model] = [*self.running[model], *self.waiting[model]]
        self.running[model] = []
        for live in self.waiting[model]:
            live.done_tokens = 0

    def preempt_latest(self, model: str) -> int | None:
        """Let the latest request with KV wait for a prefill again, before the other requests.

        Return the number of its tokens with KV, or None if no other request has KV. Requests in
        chunked prefill are later than answers.
        """
        running, waiting = self.running[model], self.waiting[model]
        begun = [live for live in waiting if live.done_tokens]
        if len(running) + len(begun) < 2:
            return None
        if begun:
            num_tokens, begun[-1].done_tokens = begun[-1].done_tokens, 0
            return num_tokens
        live = running.pop()
        live.num_repeated, live.done_tokens = len(live.token_times_s), 0
        waiting.insert(0, live)
        return live.context_tokens

    def use_of(self, model: str, targets: Targets) -> tuple[int, float]:
        """Return the number of a model's requests and the earliest deadline of a token."""
        lives = self.present(model)
        due_s = (targets.deadline_s(live.request.arrival_s, live.num_tokens) for live in lives)
        return len(lives), min(due_s, default=math.inf)

    def take_finished(self, model: str) -> list[SimLive]:
        """Remove and return a model's requests with complete answers."""
        running = self.running[model]
        finished = [
            request
            for request in running
            if len(request.token_times_s) >= request.request.output_tokens
        ]
        if finished:
            self.running[model] = [live for live in running if live.num_left > 0]
        return finished

    def take_prefilled(self, model: str) -> list[SimLive]:
        """Move a model's requests with prefilled prompts to ``running``; return the requests."""
        waiting = self.waiting[model]
        ready = [live for live in waiting if live.done_tokens == live.prefill_tokens]
        for live in ready:
            waiting.remove(live)
            self.running[model].append(live)
        return ready

    def remove(self, live: SimLive) -> int:
        """Remove a request; return the number of its tokens with KV."""
        model = live.request.model
        for lives in (self.attaching, self.running[model]):
            if live in lives:
                lives.remove(live)
                return live.context_tokens
        if live is self.prefilling:
            self.prefilling = None
        else:
            self.waiting[model].remove(live)
        return live.done_tokens

    def kv_tokens(self, model: str) -> int:
        """Return the number of tokens of a model with KV."""
        unprefilled = self.unprefilled(model)
        rest = self.all(model)[len(unprefilled) :]
        return sum(request.done_tokens for request in unprefilled) + sum(
            other.context_tokens for other in rest
        )
