"""A device in synthetic time, with round numbers, and what it said."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from gpupoold.sim.live import SimLive
from gpupoold.sim.workloads import SimRequest
from gpupoold.simdevice.device import PacedDevice
from gpupoold.simdevice.models import Vocabulary
from gpupoold.wire import messages as m
from tests.sim.box import GB, latency, models

KV_BYTES = 100_000
STEP_S = 0.01
PREFILL_S = 0.02  # of 100 tokens
SWITCH_S = 1.0
PROMPT = 100


class Box:
    """One device; ``at`` lets time pass in small steps, as a process with a free core would."""

    def __init__(
        self,
        *names: str,
        capacity_gb: float = 80,
        weight_gb: float = 10,
        number: int = 0,
        kv_host_bytes: int | None = None,
    ) -> None:
        self.sent: list[m.Message] = []
        self.fds: list[int] = []
        self.device = PacedDevice(
            number, int(capacity_gb * GB), self.record, kv_host_bytes=kv_host_bytes
        )
        self.sim = self.device.sim
        self.now_s = 0.0
        self._turns = 0
        kind = models(names, weight_gb, kv_bytes_per_token=KV_BYTES, speed=latency(STEP_S))
        for model in kind.values():
            self.device.add_model(model, Vocabulary.of_size(32_000))
        self.sent.clear()

    def record(self, message: m.Message, fds: Sequence[int] = ()) -> None:
        """Note what is said."""
        self.sent.append(message)
        self.fds += [os.dup(fd) for fd in fds]

    def ask(self, model: str, request_id: str, max_tokens: int, prompt: int = PROMPT) -> SimLive:
        """A request that comes now."""
        live = SimLive(SimRequest(request_id, model, self.now_s, prompt, max_tokens))
        self.device.add(live)
        return live

    def turn(
        self,
        model: str | None,
        quota_s: float = 9.0,
        then: str | None = None,
        turn_id: int = 0,
        chunk_tokens: int | None = None,
    ) -> int:
        """An order, by default for a new turn; its id."""
        self._turns = turn_id or self._turns + 1
        if model is None:
            self.device.end_turn()
        else:
            self.device.run_turn(m.RunTurn(self._turns, model, quota_s, then, chunk_tokens))
        self.device.advance(self.now_s)
        return self._turns

    def at(self, now_s: float) -> None:
        """Do each thing when it is due, up to ``now_s``."""
        while (due_s := self.device.next_due_s) is not None and due_s <= now_s:
            self.device.advance(due_s)
        self.late(now_s)

    def late(self, now_s: float) -> None:
        """Do nothing until ``now_s``, then all that was due."""
        self.now_s = now_s
        self.device.advance(now_s)

    def of(self, kind: type[m.Message]) -> list[m.Message]:
        """What was said of one kind."""
        return [message for message in self.sent if isinstance(message, kind)]

    def outputs(self) -> list[m.StepOutputs]:
        """All outputs."""
        return [message for message in self.sent if isinstance(message, m.StepOutputs)]

    def ended(self) -> list[int]:
        """Ids of turns that ended, in order."""
        return [message.turn_id for message in self.sent if isinstance(message, m.TurnReport)]

    def token_times(self, request_id: str) -> list[float]:
        """When each token of a request was told of."""
        return [
            output.at_s
            for output in self.outputs()
            for item in output.progress
            if item.request_id == request_id
            for _ in item.new_token_ids
        ]

    def tokens(self, request_id: str) -> list[int]:
        """A request's tokens."""
        return [token for item in self._items(request_id) for token in item.new_token_ids]

    def finish(self, request_id: str) -> str | None:
        """Why a request ended."""
        return next((i.finish_reason for i in self._items(request_id) if i.finish_reason), None)

    def _items(self, request_id: str) -> Iterable[m.RequestProgress]:
        for output in self.outputs():
            yield from (item for item in output.progress if item.request_id == request_id)
