"""Readings of GPUs against a stand-in for NVML that fails with the library's own errors."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gpupoold.config.machine import visible_entry
from gpupoold.config.sections import DeviceSettings
from gpupoold.system.nvml import NO_READING, GpuReadings, Reading, has_display

UUIDS = ("GPU-aa11-0", "GPU-ab22-1", "GPU-cc33-2")


class FakeNvml:
    """Three GPUs; ``failing`` has the error of each function that fails."""

    NVMLError = pynvml.NVMLError
    NVMLError_FunctionNotFound = pynvml.NVMLError_FunctionNotFound
    NVML_ERROR_NOT_FOUND = pynvml.NVML_ERROR_NOT_FOUND
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_FEATURE_ENABLED = pynvml.NVML_FEATURE_ENABLED
    nvmlEventTypeXidCriticalError = pynvml.nvmlEventTypeXidCriticalError

    def __init__(self) -> None:
        self.xids: dict[int, list[int]] = {}
        self.remapped = [7, 0, 0, 0]
        self.event_sets: list[list[int]] = []
        self.failing: dict[str, Exception] = {}
        self.num_inits = 0
        self.active: set[int] = set()  # GPUs with memory for a display
        self.connected: set[int] = set()  # GPUs with a monitor

    def _may_fail(self, name: str) -> None:
        if name in self.failing:
            raise self.failing[name]

    def nvmlInit(self) -> None:
        self.num_inits += 1
        self._may_fail("nvmlInit")

    def nvmlEventSetCreate(self) -> list[int]:
        self._may_fail("nvmlEventSetCreate")
        self.event_sets.append([])
        return self.event_sets[-1]

    def nvmlEventSetFree(self, events: list[int]) -> None:
        self.event_sets.remove(events)

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: list[int]) -> None:
        events.append(handle)

    def nvmlEventSetWait_v2(self, events: list[int], timeout_ms: int) -> Any:
        [handle] = events
        if not self.xids.get(handle):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        xid = self.xids[handle].pop(0)
        return SimpleNamespace(eventType=self.nvmlEventTypeXidCriticalError, eventData=xid)

    def nvmlDeviceGetRemappedRows(self, handle: int) -> list[int]:
        self._may_fail("nvmlDeviceGetRemappedRows")
        return self.remapped

    def nvmlDeviceGetCount(self) -> int:
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._may_fail("nvmlDeviceGetHandleByIndex")
        if index >= len(UUIDS):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return UUIDS[handle]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._may_fail("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=10 * handle + 7, memory=1)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._may_fail("nvmlDeviceGetTemperature")
        return 40 + handle

    def nvmlDeviceGetTemperatureV(self, handle: int, sensor: int) -> int:
        return 50 + handle

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._may_fail("nvmlDeviceGetPowerUsage")
        return 123_000 + handle

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        self._may_fail("nvmlDeviceGetTotalEnergyConsumption")
        return 5_000_000 + handle

    def nvmlDeviceGetDisplayActive(self, handle: int) -> int:
        self._may_fail("nvmlDeviceGetDisplayActive")
        return int(handle in self.active)

    def nvmlDeviceGetDisplayMode(self, handle: int) -> int:
        return int(handle in self.connected)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._may_fail("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=1000, used=100 + handle)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def cuda(*indices: int) -> list[DeviceSettings]:
    return [DeviceSettings(kind="cuda", index=index) for index in indices]


def readings_of(
    nvml: FakeNvml, *indices: int, clock: Clock | None = None, **environment: str
) -> GpuReadings:
    return GpuReadings(cuda(*indices), environment, nvml, clock or Clock())


@pytest.mark.parametrize(
    ("visible", "index", "entry"),
    [
        (None, 1, "1"),
        ("2,0", 0, "2"),
        ("2, 0", 1, "0"),
        ("GPU-ab,GPU-cc", 1, "GPU-cc"),
        ("2", 1, None),
        ("", 0, None),
    ],
)
def test_entry_that_names_a_cuda_device(visible: str | None, index: int, entry: str | None) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_entry(index, environment) == entry


async def test_a_gpu_with_a_display_is_known_before_a_worker_starts() -> None:
    nvml = FakeNvml()
    nvml.active, nvml.connected = {0}, {1}
    readings = readings_of(nvml, 0, 1, 2)
    readings.start()
    found = [(await readings.first_of(number)).has_display for number in range(3)]
    assert found == [True, True, False]
    readings.stop()


async def test_no_gpu_no_display() -> None:
    assert not (await readings_of(FakeNvml()).first_of(0)).has_display


def test_a_display_is_not_known_to_all_gpus() -> None:
    nvml = FakeNvml()
    nvml.connected = {0}
    nvml.failing["nvmlDeviceGetDisplayActive"] = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert [has_display(handle, nvml) for handle in range(2)] == [True, False]


def test_values_come_in_base_units() -> None:
    readings = readings_of(FakeNvml(), 1)
    readings.refresh()
    reading = readings.of(0)
    assert (reading.utilisation, reading.temperature_c) == (0.17, 41.0)
    assert reading.power_w == pytest.approx(123.001)
    assert readings.of(1) is NO_READING


@pytest.mark.parametrize(
    ("visible", "temperature_c"), [("2,1", 42), ("GPU-ab,GPU-aa", 41), ("GPU-cc33-2", 42)]
)
def test_visible_devices_are_followed(visible: str, temperature_c: float) -> None:
    readings = readings_of(FakeNvml(), 0, CUDA_VISIBLE_DEVICES=visible)
    readings.refresh()
    assert readings.of(0).temperature_c == temperature_c


@pytest.mark.parametrize("visible", ["7", "GPU-zz", "MIG-0"])
def test_device_that_is_not_there_has_no_reading(visible: str) -> None:
    readings = readings_of(FakeNvml(), 0, CUDA_VISIBLE_DEVICES=visible)
    readings.refresh()
    assert readings.of(0) == NO_READING


def test_an_order_that_nvml_does_not_know_gives_no_reading_rather_than_anothers() -> None:
    readings = readings_of(FakeNvml(), 0, CUDA_DEVICE_ORDER="FASTEST_FIRST")
    readings.refresh()
    assert readings.of(0) == NO_READING


@pytest.mark.parametrize(
    "code",
    [
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_NO_PERMISSION,
    ],
)
def test_without_a_driver_nothing_is_known_until_it_is_there(
    code: int, caplog: pytest.LogCaptureFixture
) -> None:
    nvml, clock = FakeNvml(), Clock()
    nvml.failing["nvmlInit"] = pynvml.NVMLError(code)
    readings = readings_of(nvml, 0, clock=clock)
    for _ in range(3):
        readings.refresh()
        clock.now_s += 1
    assert (readings.of(0), nvml.num_inits) == (NO_READING, 1)
    del nvml.failing["nvmlInit"]
    clock.now_s += 60
    readings.refresh()
    assert readings.of(0).temperature_c == 40
    assert caplog.text.count("no utilisation or temperature") == 1


def test_sensor_that_is_not_there_is_none_and_the_others_are_read() -> None:
    nvml = FakeNvml()
    nvml.failing["nvmlDeviceGetPowerUsage"] = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    readings = readings_of(nvml, 2)
    readings.refresh()
    assert readings.of(0) == Reading(0.27, 42.0, None, 102, ordinal=2, energy_j=5000.002)


def group(*gpus: int) -> DeviceSettings:
    return DeviceSettings.model_validate({"kind": "cuda", "gpus": gpus})


def test_a_group_has_a_reading_for_each_gpu() -> None:
    readings = GpuReadings([*cuda(0), group(2, 1)], {}, FakeNvml(), Clock())
    readings.refresh()
    reading = readings.of(1)
    assert [one.ordinal for one in reading.gpus] == [2, 1]
    assert [one.utilisation for one in reading.gpus] == [0.27, 0.17]
    assert reading.utilisation == pytest.approx(0.22)
    assert reading.temperature_c == 42.0
    assert reading.power_w == pytest.approx(123.001 + 123.002)
    assert reading.used_bytes == 203
    assert readings.of(0).gpus == ()


def test_a_gpu_of_a_group_that_is_lost_leaves_the_others_readings() -> None:
    readings = GpuReadings([group(0, 7)], {}, FakeNvml(), Clock())
    readings.refresh()
    reading = readings.of(0)
    assert [one.temperature_c for one in reading.gpus] == [40.0, None]
    assert (reading.temperature_c, reading.utilisation, reading.power_w) == (40.0, None, None)


def test_newer_drivers_tell_the_temperature_by_another_call() -> None:
    nvml = FakeNvml()
    nvml.failing["nvmlDeviceGetTemperature"] = pynvml.NVMLError(
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    )
    readings = readings_of(nvml, 0)
    readings.refresh()
    assert readings.of(0).temperature_c == 50


async def test_gpu_that_is_lost_and_comes_back() -> None:
    nvml, clock = FakeNvml(), Clock()
    readings = readings_of(nvml, 0, clock=clock)
    readings.refresh()
    lost = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    names = (
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetMemoryInfo",
    )
    nvml.failing = dict.fromkeys(names, lost)
    for _ in range(2):
        clock.now_s += 61
        readings.refresh()
        assert readings.of(0) in (NO_READING, Reading(ordinal=0))
        assert await readings.fault_of(0) == "GPU 0: the GPU cannot be read any more"
        assert nvml.event_sets == []
    nvml.failing = {}
    clock.now_s += 61
    readings.refresh()
    assert readings.of(0).temperature_c == 40


@pytest.mark.parametrize(
    ("xids", "fault"),
    [
        ([79], "GPU 1: Xid 79, the GPU has fallen off the bus"),
        ([13, 31, 94, 48], "GPU 1: Xid 94, a contained memory error"),
        ([13, 31, 43, 45], ""),
    ],
)
async def test_xids_of_the_hardware_are_faults_of_the_device(xids: list[int], fault: str) -> None:
    nvml, clock = FakeNvml(), Clock()
    readings = GpuReadings([*cuda(0), group(2, 1)], {}, nvml, clock)
    readings.refresh()
    nvml.xids = {1: xids}
    readings.refresh()
    assert (await readings.fault_of(1), await readings.fault_of(0)) == (fault, "")
    clock.now_s += 181
    readings.refresh()
    assert await readings.fault_of(1) == "", "the death has another cause"


async def test_rows_that_are_remapped_are_faults_where_xids_are_not_told() -> None:
    nvml = FakeNvml()
    nvml.failing = dict.fromkeys(
        ("nvmlEventSetCreate", "nvmlDeviceGetRemappedRows"),
        pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED),
    )
    readings = readings_of(nvml, 0)
    readings.refresh()
    del nvml.failing["nvmlDeviceGetRemappedRows"]
    readings.refresh()
    assert await readings.fault_of(0) == "", "older than the daemon"
    nvml.remapped = [9, 0, 0, 0]
    readings.refresh()
    assert await readings.fault_of(0) == "", "the errors were corrected"
    nvml.remapped = [9, 1, 1, 0]
    readings.refresh()
    assert await readings.fault_of(0) == "GPU 0: rows of memory are to be remapped"


async def test_a_fault_is_waited_for_until_the_next_reading() -> None:
    nvml, clock = FakeNvml(), Clock()
    readings = readings_of(nvml, 0, clock=clock)
    readings.refresh()
    clock.now_s += 1
    asked = asyncio.create_task(readings.fault_of(0))
    await asyncio.sleep(0)
    nvml.xids = {0: [119]}
    readings.refresh()
    assert await asked == "GPU 0: Xid 119, the firmware does not answer"


def test_reading_grows_old_when_the_driver_hangs() -> None:
    clock = Clock()
    readings = readings_of(FakeNvml(), 0, clock=clock)
    readings.refresh()
    clock.now_s += 9
    assert readings.of(0).temperature_c == 40
    clock.now_s += 2
    assert readings.of(0) == NO_READING


def test_thread_outlives_whatever_the_bindings_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = FakeNvml()
    nvml.failing["nvmlInit"] = OSError("no such library")
    readings = GpuReadings(cuda(0), {}, nvml, Clock(), interval_s=0.001)
    has_read = threading.Event()
    read = FakeNvml.nvmlDeviceGetPowerUsage

    def read_power(handle: int) -> int:
        has_read.set()
        return read(nvml, handle)

    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", read_power)
    readings.start()
    deadline_s = time.monotonic() + 20
    while "reading GPUs failed" not in caplog.text:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    nvml.failing = {}
    readings._retry_at_s = None
    assert has_read.wait(20)
    readings.stop()


def test_real_library_without_a_driver_or_with_one_never_raises() -> None:
    readings = GpuReadings(cuda(0), {})
    readings.refresh()
    assert isinstance(readings.of(0), Reading)


def test_nothing_is_asked_where_no_device_is_a_gpu() -> None:
    before = threading.active_count()
    GpuReadings([DeviceSettings(kind="emulated")]).start()
    assert threading.active_count() == before
