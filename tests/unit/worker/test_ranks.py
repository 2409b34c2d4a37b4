"""Messages of a group's leader: the bytes of all ranks."""

from __future__ import annotations

from dataclasses import replace

from gpupoold.domain import DeviceActivity
from gpupoold.wire import messages as m
from gpupoold.worker.process import of_group
from tests.unit.wire.samples import MEMORY, SWITCH


def test_records_inside_count_for_all_ranks() -> None:
    status = m.WorkerStatus(6.5, DeviceActivity("llama", 99, 1 << 30, 0), 0.25, [MEMORY])
    memory = replace(MEMORY, weights_total_bytes=1 << 34, kv_resident_bytes=10, kv_host_bytes=12)
    assert of_group(status, 2).models == [memory]
    switch = of_group(m.Switched(SWITCH, 2.5e10), 2)
    assert switch.bandwidth_bytes_per_s == 5e10
    assert switch.switch.weight_bytes == 2 * SWITCH.weight_bytes
    assert switch.switch.total_s == SWITCH.total_s
