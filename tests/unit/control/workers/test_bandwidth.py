"""The scheduling core goes by the bandwidth that a worker's switches reach."""

from __future__ import annotations

import pytest

from gpupoold.wire import messages as m
from tests.unit.control.requests.migration_box import Box
from tests.unit.wire.samples import SWITCH


@pytest.fixture
def box() -> Box:
    return Box(2)


def bandwidths(box: Box) -> list[float]:
    devices = box.dispatcher.state.devices
    return [devices[number].bandwidth_bytes_per_s for number in sorted(devices)]


def switched(box: Box, number: int, bandwidth_bytes_per_s: float) -> None:
    message = m.Switched(SWITCH, bandwidth_bytes_per_s)
    box.dispatcher.from_worker(box.workers[number], message)


def test_what_is_measured_is_what_costs_are_estimated_with(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box.records, "record_switch", lambda _: None, raising=False)
    assert bandwidths(box) == [1e9, 1e9]
    switched(box, 1, 2.5e8)
    assert bandwidths(box) == [1e9, 2.5e8]
    switched(box, 1, 2.55e8)  # not worth an event
    assert bandwidths(box) == [1e9, 2.5e8]
    switched(box, 1, 0.0)  # of one that does not measure it
    assert bandwidths(box) == [1e9, 2.5e8]
    switched(box, 0, 4e9)
    assert bandwidths(box) == [4e9, 2.5e8]
    box.die(1)
    switched(box, 1, 5e9)  # said before it died
    box.come_up(1)
    assert bandwidths(box) == [4e9, 1e9]
