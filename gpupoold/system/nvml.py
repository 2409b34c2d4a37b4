"""NVIDIA's NVML: utilisation, temperature, power, energy, memory, faults, processes of GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pynvml

from gpupoold.config.machine import visible_entry

if TYPE_CHECKING:
    from gpupoold.config.sections import DeviceSettings

_logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
# Between two attempts to find a driver or a device.
_RETRY_S = 60.0
# Age at which a reading counts as unknown.
_STALE_S = 10.0
# A death this long after a fault is due to the fault: a worker may hang before.
_FAULT_S = 180.0
# The longest wait for a reading, and the time between two looks.
_MOST_WAIT_S, _POLL_S = 2.0, 0.05
# In a reading, of a GPU; the wait for each.
_MOST_EVENTS, _EVENT_WAIT_MS = 64, 1
# Xids of NVIDIA's catalogue that name hardware, a link or the GPU's firmware. Xids that a program
# can cause (13, 31, 43, 45 and others) are left out.
_FAULT_XIDS = {
    48: "an uncorrectable memory error",
    62: "the microcontroller has halted",
    63: "a memory row is to be remapped",
    64: "a memory row cannot be remapped",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the firmware does not answer",
    120: "an error of the firmware",
    140: "an unrecovered memory error",
}
_WATTS_PER_MILLIWATT = 1e-3
_JOULES_PER_MILLIJOULE = 1e-3


@dataclass(frozen=True, slots=True)
class Reading:
    """A device's readings: ``utilisation`` from 0 to 1; None if unknown.

    Of a group, ``gpus`` has the readings of each GPU in the order of the ranks; the device has the
    mean utilisation, the highest temperature, and the sums of power, energy and memory.
    ``used_bytes`` counts all processes on the GPU. ``energy_j`` is a counter since some time before
    the daemon's start. ``ordinal`` is the GPU of a reading, None for a group. ``has_display``:
    programs that draw take memory as they need it.
    """

    utilisation: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    used_bytes: int | None = None
    ordinal: int | None = None
    energy_j: float | None = None
    gpus: tuple[Reading, ...] = ()
    has_display: bool = False


NO_READING = Reading()


def of_group(readings: Sequence[Reading]) -> Reading:
    """Return the reading of a group of GPUs."""

    def total(name: str) -> Any:
        values = [getattr(reading, name) for reading in readings]
        return None if None in values else sum(values)

    busy = total("utilisation")
    warm = [reading.temperature_c for reading in readings if reading.temperature_c is not None]
    return Reading(
        None if busy is None else busy / len(readings),
        max(warm, default=None),
        total("power_w"),
        total("used_bytes"),
        energy_j=total("energy_j"),
        gpus=tuple(readings),
        has_display=any(reading.has_display for reading in readings),
    )


class GpuReadings:
    """The latest reading of each CUDA device of the configuration.

    A separate thread calls the driver, which may be slow or hang, and all readers get the latest
    value; an old value counts as unknown. No call fails: without a driver, device or sensor the
    value is None. ``environment`` determines the visible GPUs and their order.
    """

    def __init__(
        self,
        devices: Sequence[DeviceSettings],
        environment: Mapping[str, str] = os.environ,
        nvml: Any = pynvml,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._nvml = nvml
        self._clock = clock
        self._interval_s = interval_s
        self._gpus = {number: device.gpus for number, device in enumerate(devices)}
        self._entries = {
            ordinal: entry
            for device in devices
            for ordinal in device.gpus
            if (entry := visible_entry(ordinal, environment)) is not None
        }
        self._is_order_known = environment.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID") == "PCI_BUS_ID"
        self._handles: dict[int, Any] = {}
        self._watches: dict[int, _FaultWatch] = {}
        self._faults: dict[int, tuple[float, str]] = {}  # the latest of each GPU, with the time
        self._retry_at_s: float | None = None
        self._is_connected = False
        self._readings: dict[int, Reading] = {}
        self._read_at_s = 0.0
        self._stopped = threading.Event()

    def start(self) -> None:
        """Read the GPUs every second in a thread, if there is a CUDA device."""
        if self._entries:
            # A daemon thread: a thread that hangs in the driver must not keep the process alive.
            threading.Thread(target=self._run, name="nvml", daemon=True).start()

    def stop(self) -> None:
        """Stop reading; returns at once, even if the driver hangs."""
        self._stopped.set()

    def of(self, number: int) -> Reading:
        """Return the latest reading of a device."""
        if self._clock() - self._read_at_s > _STALE_S:
            return NO_READING
        gpus = self._gpus.get(number, ())
        readings = [self._readings.get(gpu, Reading(ordinal=gpu)) for gpu in gpus]
        if len(gpus) > 1:
            return of_group(readings)
        return self._readings.get(gpus[0], NO_READING) if gpus else NO_READING

    async def fault_of(self, number: int) -> str:
        """Return the latest fault of a device's GPUs up to now, empty without one.

        Wait at most 2 s for a reading that has begun after the call; old faults do not count.
        """
        now_s = self._clock()
        for _ in range(round(_MOST_WAIT_S / _POLL_S)):
            if not self._handles or self._read_at_s >= now_s:
                break
            await asyncio.sleep(_POLL_S)
        known = [self._faults[gpu] for gpu in self._gpus.get(number, ()) if gpu in self._faults]
        at_s, fault = max(known, default=(now_s, ""))
        return fault if now_s - at_s <= _FAULT_S else ""

    async def first_of(self, number: int) -> Reading:
        """Return a reading of a device as soon as there is one, after at most 2 s."""
        for _ in range(round(_MOST_WAIT_S / _POLL_S)):
            if not self._entries or self._read_at_s:
                break
            await asyncio.sleep(_POLL_S)
        return self.of(number)

    def refresh(self) -> None:
        """Read the GPUs once; returns only when the driver has answered."""
        began_s = self._clock()
        self._find_handles()
        for ordinal, watch in self._watches.items():
            if fault := watch.new_fault():
                self._note_fault(ordinal, fault)
        before = self._readings
        self._readings = {
            index: self._read(index, handle) for index, handle in self._handles.items()
        }
        for ordinal, reading in self._readings.items():
            if reading == Reading(ordinal=ordinal):
                if before.get(ordinal, reading) != reading:
                    self._note_fault(ordinal, "the GPU cannot be read any more")
                del self._handles[ordinal]  # the device may be lost or reset
                self._watches.pop(ordinal).close()
        self._read_at_s = began_s

    def _note_fault(self, ordinal: int, fault: str) -> None:
        self._faults[ordinal] = (self._clock(), f"GPU {ordinal}: {fault}")
        _logger.error("GPU %d: %s", ordinal, fault)

    def _run(self) -> None:
        has_logged = False
        while not self._stopped.is_set():
            try:
                self.refresh()
            except Exception:  # an error of the driver's bindings must cost only a gauge
                if not has_logged:
                    _logger.exception("reading GPUs failed")
                has_logged = True
            self._stopped.wait(self._interval_s)

    def _find_handles(self) -> None:
        missing = self._entries.keys() - self._handles.keys()
        now_s = self._clock()
        if not missing or (self._retry_at_s is not None and now_s < self._retry_at_s):
            return
        is_first, self._retry_at_s = self._retry_at_s is None, now_s + _RETRY_S
        try:
            if not self._is_connected:
                self._nvml.nvmlInit()
                self._is_connected = True
        except self._nvml.NVMLError as error:
            if is_first:
                _logger.warning("no utilisation or temperature of GPUs: %s", error)
            return
        for ordinal in sorted(missing):
            try:
                handle = self._handles[ordinal] = self._handle_of(self._entries[ordinal])
                self._watches[ordinal] = _FaultWatch(handle, self._nvml)
            except self._nvml.NVMLError as error:
                _logger.warning("GPU %s cannot be read: %s", self._entries[ordinal], error)
                # A reloaded driver needs a new connection.
                self._is_connected = False

    def _handle_of(self, entry: str) -> Any:
        """Return the device of an entry of ``CUDA_VISIBLE_DEVICES``.

        Raises:
            NVMLError: no device matches, or several do.
        """
        nvml = self._nvml
        if entry.isdecimal():
            if not self._is_order_known and nvml.nvmlDeviceGetCount() > 1:
                raise nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)
            return nvml.nvmlDeviceGetHandleByIndex(int(entry))
        if entry.startswith("MIG-"):
            return nvml.nvmlDeviceGetHandleByUUID(entry)
        # CUDA accepts the beginning of a UUID; NVML does not.
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        for handle in handles:
            if nvml.nvmlDeviceGetUUID(handle).startswith(entry):
                return handle
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)

    def _read(self, ordinal: int, handle: Any) -> Reading:
        nvml = self._nvml
        used_bytes = self._value(lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used, handle)
        power_mw = self._value(nvml.nvmlDeviceGetPowerUsage, handle)
        energy_mj = self._value(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        percent = self._value(lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu, handle)
        return Reading(
            None if percent is None else percent / 100,
            self._value(self._temperature, handle),
            None if power_mw is None else power_mw * _WATTS_PER_MILLIWATT,
            None if used_bytes is None else int(used_bytes),
            ordinal,
            None if energy_mj is None else energy_mj * _JOULES_PER_MILLIJOULE,
            has_display=has_display(handle, nvml),
        )

    def _temperature(self, handle: Any) -> float:
        """Return the temperature; drivers of CUDA 14 have only the second call, before 12.9 the
        first.
        """
        nvml = self._nvml
        try:
            return float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        except nvml.NVMLError_FunctionNotFound:
            return float(nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU))

    def _value(self, read: Callable[[Any], float], handle: Any) -> float | None:
        try:
            return float(read(handle))
        except self._nvml.NVMLError:
            return None


class _FaultWatch:
    """Faults of a GPU's hardware from now on: Xids, and rows of memory that are remapped.

    NVML reports an Xid to every process that has registered, however long the GPU's users live.
    Virtual GPUs, WSL and old drivers may report no Xids, and GPUs before Ampere remap no rows.
    """

    def __init__(self, handle: Any, nvml: Any) -> None:
        self._handle = handle
        self._nvml = nvml
        self._events: Any = None
        self._rows = self._remapped()
        with contextlib.suppress(nvml.NVMLError):
            self._events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    def new_fault(self) -> str:
        """Return the first fault since the last call, empty without one."""
        xids = [xid for xid in self._xids() if xid in _FAULT_XIDS]
        before, self._rows = self._rows, self._remapped() or self._rows
        if xids:
            return f"Xid {xids[0]}, {_FAULT_XIDS[xids[0]]}"
        return "rows of memory are to be remapped" if before and self._rows > before else ""

    def close(self) -> None:
        if self._events is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._events)

    def _xids(self) -> Iterator[int]:
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):  # there is no further event, or there are none
            for _ in range(_MOST_EVENTS if self._events is not None else 0):
                event = nvml.nvmlEventSetWait_v2(self._events, _EVENT_WAIT_MS)
                if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                    yield event.eventData

    def _remapped(self) -> tuple[int, ...]:
        """Return the rows remapped for errors that were not corrected, pending ones, and failures;
        empty if unknown.
        """
        with contextlib.suppress(self._nvml.NVMLError):
            return tuple(self._nvml.nvmlDeviceGetRemappedRows(self._handle)[1:])
        return ()


def has_display(handle: Any, nvml: Any = pynvml) -> bool:
    """Return whether a GPU has a monitor, or memory for a display; False if NVML does not tell."""
    for read in (nvml.nvmlDeviceGetDisplayActive, nvml.nvmlDeviceGetDisplayMode):
        with contextlib.suppress(nvml.NVMLError):
            if read(handle) == nvml.NVML_FEATURE_ENABLED:
                return True
    return False


@contextmanager
def connected(nvml: Any = pynvml) -> Iterator[None]:
    """Connect to the driver for the time of a block.

    Raises:
        NVMLError: no driver answers.
    """
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


class GpuUse(NamedTuple):
    """The use of a GPU: the number of processes, and the memory of this process in bytes.

    ``own_bytes`` is None if NVML does not list this process, or not its memory.
    """

    num_processes: int = 0
    own_bytes: int | None = None


def gpu_use(pci_bus_id: str, nvml: Any = pynvml) -> GpuUse:
    """Return the use of a GPU by processes that compute or draw; 0 processes if it is unknown.

    NVML counts this process too. Inside a container the identifiers are those of the host, or the
    processes are hidden. NVML does not list memory by process under WSL.
    """
    try:
        with connected(nvml):
            handle = nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
            found = [
                *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
                *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
            ]
    except nvml.NVMLError:
        return GpuUse()
    own = [process.usedGpuMemory for process in found if process.pid == os.getpid()]
    return GpuUse(len({process.pid for process in found}), own[0] if own else None)
