"""The order in which a worker's step is read."""

from __future__ import annotations

from typing import Any

import pytest

from gpupool_state import History
from gpupoold.config.sections import LimitSettings
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import Priority
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import Action
from gpupoold.wire import messages as m
from tests.unit.control.requests.dispatcher_bench import NAME, Bench, due_to

EXPECTED = (
    # What happens; tokens counted for the request on trial, and who knows the request then.
    ("frontend FirstTokens", 0, "core", "live"),
    ("frontend StepOutputs", 0, "core", "live"),
    ("core Stepped Ended", 5, "core", "live"),
    ("row a", 5, "", ""),
    ("left llama", 5, "", ""),
    ("core Arrived", 5, "", ""),
    ("worker AddRequest suspect", 5, "", ""),
)
"""The last step of a request on trial, while another suspect and a background request wait."""


class Traced(Bench):
    """Notes what a step has for consequences."""

    def __init__(self, history: History, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(history)
        self.trace: list[tuple[str, int, str, str]] = []
        self.cold.warm.add(NAME)
        for request_id in ("a", "suspect"):
            self.ask(request_id)
        self.request = self.dispatcher.live["a"]
        self.dispatcher.worker_down(self.worker, "died", due_to("a", "suspect"))
        self.come_back()
        order = m.AddRequest(NAME, "background", 1.0, 2, 8, [b""])
        order.priority = Priority.BACKGROUND
        self.dispatcher.set_limits(LimitSettings())
        self.dispatcher.from_frontend(order)
        assert self.request.device == 0
        assert self.dispatcher.live["suspect"].is_held
        assert set(self.scheduled) == {"a"}
        record, left = history.record_request, self.cold.request_ended
        core = self.dispatcher.shell.core
        handle = core.handle

        def send(_: Worker, message: m.Message, fds: tuple[int, ...] = ()) -> None:
            self.note(f"worker {_name(message)}")

        def record_request(row: Any) -> None:
            self.note(f"row {row.request_id}")
            record(row)

        def request_ended(model: str, device: int | None) -> None:
            self.note(f"left {model}")
            left(model, device)

        def handle_noted(events: tuple[e.Event, ...], now_s: float) -> list[Action]:
            self.note(" ".join(["core", *(type(one).__name__ for one in events)]))
            return handle(events, now_s)

        monkeypatch.setattr(core, "handle", handle_noted)
        monkeypatch.setattr(Worker, "send", send)
        monkeypatch.setattr(history, "record_request", record_request)
        monkeypatch.setattr(self.cold, "request_ended", request_ended)

    def note(self, what: str) -> None:
        in_core = "core" if "a" in self.scheduled else ""
        is_live = "live" if self.dispatcher.live.get("a") else ""
        self.trace.append((what, len(self.request.output_token_ids), in_core, is_live))

    def send(self, number: int, message: m.Message) -> None:
        super().send(number, message)
        if not isinstance(message, m.AdmissionAnswer):
            self.note(f"frontend {_name(message)}")

    def step(self) -> tuple[tuple[str, int, str, str], ...]:
        progress = [m.RequestProgress("a", [1, 2, 3, 4, 5], "stop")]
        outputs = m.StepOutputs(NAME, self.request.arrival_s + 1.0, [b""], progress, 0.02)
        self.dispatcher.from_worker(self.worker, outputs)
        return tuple(self.trace)


def _name(message: m.Message) -> str:
    kind = type(message).__name__
    return f"{kind} {message.request_id}" if isinstance(message, m.AddRequest) else kind


async def test_a_step_is_read_in_order(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Traced(history, monkeypatch).step() == EXPECTED


@pytest.mark.parametrize("first", range(5))
async def test_no_two_neighbours_may_be_exchanged(
    history: History, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Each exchange has consequences, which the test above would find."""
    box = Traced(history, monkeypatch)
    readers = list(box.dispatcher.output_readers)
    assert len(readers) == 6
    readers[first], readers[first + 1] = readers[first + 1], readers[first]
    box.dispatcher.output_readers = tuple(readers)
    assert box.step() != EXPECTED
