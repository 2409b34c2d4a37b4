"""A device in made-up time, with round numbers, and what it said."""

from __future__ import annotations

from collections.abc import Iterable

from gpupoold.domain import Targets
from gpupoold.latency.models import LatencyModel, LinearDecode, LinearPrefill, SwitchModel
from gpupoold.sim.model import SimModel
from gpupoold.simdevice.device import Answer, PacedDevice
from gpupoold.simdevice.made_up import Vocabulary
from gpupoold.wire import messages as m

GB = 10**9
KV_BYTES = 100_000
STEP_S = 0.01
PREFILL_S = 0.02  # of 100 tokens
SWITCH_S = 1.0
PROMPT = 100
LATENCY = LatencyModel(
    prefill=LinearPrefill(token_s=1e-4, base_s=0.01),
    decode=LinearDecode(context_s=0.0, sequence_s=0.0, base_s=STEP_S),
    switch=SwitchModel(10 * GB),
)


def sim_model(name: str, weight_gb: float = 10) -> SimModel:
    """A model of 10 s and 100 ms, whose switch takes 0.1 s per GB."""
    return SimModel(name, Targets(10.0, 0.1), LATENCY, int(weight_gb * GB), KV_BYTES)


class Box:
    """One device; ``at`` lets time pass in small steps, as a process with a free core would."""

    def __init__(self, *names: str, capacity_gb: float = 80, weight_gb: float = 10) -> None:
        self.said: list[m.Message] = []
        self.device = PacedDevice(0, int(capacity_gb * GB), self.said.append)
        self.now_s = 0.0
        self._turns = 0
        for name in names:
            self.device.add_model(sim_model(name, weight_gb), Vocabulary.of_size(32_000))
        self.said.clear()

    def ask(self, model: str, request_id: str, max_tokens: int, prompt: int = PROMPT) -> Answer:
        """A request that comes now."""
        answer = Answer(request_id, model, self.now_s, prompt, max_tokens)
        self.device.add(answer)
        return answer

    def turn(
        self, model: str | None, quota_s: float = 9.0, then: str | None = None, turn_id: int = 0
    ) -> int:
        """An order, by default for a new turn; its id."""
        self._turns = turn_id or self._turns + 1
        self.device.run_turn(m.RunTurn(self._turns, model, quota_s, then))
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
        return [message for message in self.said if isinstance(message, kind)]

    def outputs(self) -> list[m.StepOutputs]:
        """All outputs."""
        return [message for message in self.said if isinstance(message, m.StepOutputs)]

    def ended(self) -> list[int]:
        """Ids of turns that ended, in order."""
        ends = [message for message in self.said if isinstance(message, m.TurnEnded)]
        return [message.turn_id for message in ends if message.turn_id]

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
