"""A dispatcher between a worker and frontends that keep what they are sent."""

from __future__ import annotations

import time

from gpupool_state import History
from gpupoold.config.sections import DeviceSettings, LimitSettings
from gpupoold.control.live_requests import RequestListener
from gpupoold.control.processes.supervised import Candidates
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import DeviceFacts, Targets
from gpupoold.scheduling.invariants import check_state
from gpupoold.scheduling.policies.named import PolicyOptions, make_policy
from gpupoold.scheduling.state import Request
from gpupoold.wire import messages as m
from tests.unit.control.fleet_box import FleetBox, settings_with
from tests.unit.control.loaded import loaded

NAME = "llama"


def due_to(*request_ids: str) -> Candidates:
    return Candidates(frozenset(request_ids))


class Cold(RequestListener):
    """What is told of models' use, and which are warm."""

    def __init__(self, box: FleetBox) -> None:
        self.warm = box.warm
        self.begun: list[str] = []
        self.uses: list[str] = []
        self.refused: list[m.GrammarRefused] = []

    def weights_wanted(self, model: str) -> None:
        self.begun.append(model)

    def request_began(self, model: str) -> None:
        self.uses.append(f"used {model}")

    def request_ended(self, model: str, device: int | None) -> None:
        self.uses.append(f"left {model}")

    def weights_damaged(self, answer: m.WrongAnswer) -> None:
        self.uses.append(f"damaged {answer.model}")

    def grammar_refused(self, refused: m.GrammarRefused) -> None:
        self.refused.append(refused)


class Frontend:
    """Keeps what it is sent, and whom the daemon did not take."""

    def __init__(self) -> None:
        self.sent: list[m.Message] = []
        self.refusals: list[m.AdmissionAnswer] = []

    def send(self, message: m.Message) -> None:
        if not isinstance(message, m.AdmissionAnswer):
            self.sent.append(message)
        elif message.status != 200:
            self.refusals.append(message)


class Bench:
    """A dispatcher with one worker that has a model without a snapshot."""

    def __init__(self, history: History, *, drop_late: bool = False) -> None:
        limits = LimitSettings(max_live_requests_per_model=3, drop_late=drop_late)
        policy = make_policy("gpupool", PolicyOptions())
        self.box = FleetBox([NAME])
        self.fleet = self.box.fleet
        self.dispatcher = Dispatcher(settings_with(limits), history, policy, self.fleet, self.send)
        self.cold, self.frontend = Cold(self.box), Frontend()
        self.dispatcher.listener = self.cold
        self.others: dict[int, Frontend] = {}
        self.worker = Worker(0, DeviceSettings(kind="emulated"))
        self.come_back()

    def come_back(self, device_bytes: int = 1 << 30, kv_host_bytes: int | None = None) -> None:
        self.worker.ready = m.WorkerReady(
            DeviceFacts(device_bytes, 4096, 1e9, kv_host_limit_bytes=kv_host_bytes), "0.32.0"
        )
        self.dispatcher.worker_up(self.worker)
        self.dispatcher.host(Targets(), loaded(NAME), None, self.worker)
        self.box.come_up(self.worker.number)

    def add_worker(self) -> None:
        """Another worker with the model."""
        worker = Worker(1, DeviceSettings(kind="emulated"))
        worker.ready = m.WorkerReady(DeviceFacts(1 << 30, 4096, 1e9), "0.32.0")
        self.dispatcher.worker_up(worker)
        self.dispatcher.host(Targets(), loaded(NAME), None, worker)
        self.box.come_up(1)

    def send(self, number: int, message: m.Message) -> None:
        """To the frontend 0, or another one."""
        others = self.others.setdefault(number, Frontend())
        (others if number else self.frontend).send(message)

    def ask(self, request_id: str, arrival_s: float | None = None, frontend: int = 0) -> None:
        arrival_s = time.monotonic() if arrival_s is None else arrival_s
        message = m.AddRequest(NAME, request_id, arrival_s, 2, 8, [b""], frontend=frontend)
        self.dispatcher.from_frontend(message)

    @property
    def scheduled(self) -> dict[str, Request]:
        """What the scheduling core knows."""
        return self.dispatcher.state.requests

    def check(self) -> None:
        check_state(self.dispatcher.state)
