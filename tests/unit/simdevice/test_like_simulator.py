"""The same arrivals, the same core: the device in synthetic time does what the simulator's does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpupoold.domain import Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.actions import Action, Send, StartTurn
from gpupoold.scheduling.core import Core
from gpupoold.sim.boxes import Box, box_models
from gpupoold.sim.engine import Simulation
from gpupoold.sim.lengths import sharegpt_lengths
from gpupoold.sim.metrics import RequestResult, summarise
from gpupoold.sim.model import SimModel
from gpupoold.sim.policies import make_policy
from gpupoold.sim.workloads import SimRequest, equal_rates, poisson_workload
from gpupoold.simdevice.answers import Answer
from gpupoold.simdevice.device import PacedDevice
from gpupoold.simdevice.synthetic import Vocabulary
from gpupoold.wire import messages as m

END_S = 200.0


class Pool:
    """Paced devices under the scheduling core, without any delay between them."""

    def __init__(self, models: dict[str, SimModel], box: Box) -> None:
        self.core = Core(make_policy("gpupool"))
        self.times: dict[str, list[float]] = {}
        self.now_s = 0.0
        self._events: list[e.Event] = []
        self._requests: dict[str, SimRequest] = {}
        self.devices = [
            PacedDevice(number, box.device_bytes, self._listener(number))
            for number in range(box.num_devices)
        ]
        self._events += [model.added() for model in models.values()]
        bandwidth = next(iter(models.values())).latency.switch.bandwidth_bytes_per_s
        for device in self.devices:
            self._events.append(e.DeviceUp(device.device_number, box.device_bytes, bandwidth))
            for model in models.values():
                self._events.append(e.Hosted(device.device_number, model.name))
                device.add_model(model, Vocabulary.of_size(0))
        self._settle()

    def run(self, requests: tuple[SimRequest, ...]) -> None:
        """Serve all."""
        coming = list(requests)
        while self.now_s < END_S:
            dues = [d.next_due_s for d in self.devices if d.next_due_s is not None]
            if coming:
                dues.append(coming[0].arrival_s)
            if not dues:
                return
            self.now_s = max(self.now_s, min(dues))
            for device in self.devices:
                device.advance(self.now_s)
            while coming and coming[0].arrival_s <= self.now_s:
                one = coming.pop(0)
                self._requests[one.id] = one
                self._events.append(e.Arrived(one.id, one.model, one.arrival_s, one.prompt_tokens))
            self._settle()

    def _listener(self, number: int) -> Callable[[m.Message], None]:
        return lambda message: self._hear(number, message)

    def _hear(self, number: int, message: m.Message) -> None:
        if isinstance(message, m.StepOutputs):
            ids = tuple(item.request_id for item in message.progress)
            self._events.append(e.Stepped(number, message.model, ids, 1, message.step_s))
            for item in message.progress:
                assert len(item.new_token_ids) == 1
                self.times.setdefault(item.request_id, []).append(message.at_s)
                if item.finish_reason:
                    self._events.append(e.Ended(item.request_id))
        elif isinstance(message, m.TurnReport | m.MemoryReport):
            changes = tuple(message.missing_bytes.items())
            self._events.append(e.MemoryChanged(number, changes))
            if isinstance(message, m.TurnReport):
                self._events.append(e.TurnEnded(number, message.turn_id))

    def _settle(self) -> None:
        while self._events:
            events, self._events = self._events, []
            for action in self.core.handle(events, self.now_s):
                self._carry_out(action)
            for device in self.devices:
                device.advance(self.now_s)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Send):
            one = self._requests[action.request_id]
            self.devices[action.device].add(
                Answer(one.id, one.model, one.arrival_s, one.prompt_tokens, one.output_tokens)
            )
        elif isinstance(action, StartTurn):
            device, turn = self.devices[action.device], action.turn
            if turn is None:
                device.end_turn()
            else:
                device.run_turn(m.RunTurn(turn.turn_id, turn.model, turn.quota_s, action.then))


@pytest.mark.parametrize(("num_models", "rate_rps"), [(8, 0.3), (30, 0.05)])
def test_same_attainment_and_times(num_models: int, rate_rps: float) -> None:
    box = Box(2, "H800")
    models = box_models(box, num_models, Targets())
    requests = poisson_workload(equal_rates(list(models), rate_rps), 60.0, sharegpt_lengths(), 1)
    expected = Simulation(models, make_policy("gpupool"), 2, box.device_bytes).run(requests, END_S)
    pool = Pool(models, box)
    pool.run(requests)
    results = [
        RequestResult(one, models[one.model].targets, pool.times.get(one.id, []))
        for one in requests
    ]
    ours, theirs = (summarise(r, END_S).overall for r in (results, expected.results))
    assert ours.num_finished == theirs.num_finished == len(requests)
    assert ours.attainment == pytest.approx(theirs.attainment, abs=0.02)
    assert ours.ttft_s.p50 == pytest.approx(theirs.ttft_s.p50, rel=0.2, abs=0.05)
