"""The CUDA driver's calls for device memory; no other module makes such calls.

Plain integers in and out, an exception instead of an error code. ``cuda-bindings`` is imported on
first use.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gpupoold.errors import Failed
from gpupoold.memory.device import Copy, Direction

_logger = logging.getLogger(__name__)

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: ordinary device memory
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit order with the legacy default stream
_SLEEPS = 1  # CU_EVENT_BLOCKING_SYNC: a thread that waits for the event does not spin
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_OWN_CAPTURES = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: captures of other threads are ignored
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BUS_ID_BYTES = 32
# The first version whose ``cuMemcpyBatchAsync`` has no parameter for the index of a failed copy
# (CUDA 12.8 had one): cuda-bindings 13 calls this version.
_BATCH_COPY_VERSION = 13000


_NO_DEVICE_FILES = "device files may be missing: systemctl restart gpupoold-nvidia gpupoold"
_OTHER_REMEDY = "see `gpupool doctor` and nvidia-smi"
INIT_REMEDIES = {
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible: see CUDA_VISIBLE_DEVICES and nvidia-smi",
    "CUDA_ERROR_OPERATING_SYSTEM": _NO_DEVICE_FILES,
    "CUDA_ERROR_UNKNOWN": _NO_DEVICE_FILES,
    "CUDA_ERROR_SYSTEM_NOT_READY": "the NVSwitch fabric is not up: systemctl start "
    "nvidia-fabricmanager",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver was updated while loaded: restart the machine",
}

# Drivers have crashed and hung on batches of 50,000 copies (vllm#49276). A batch of 32 MiB has at
# most 1,200 copies if each copy has at least 28 KiB.
_MAX_COPIES_PER_CALL = 1024
# The engines' small copies wait behind the present copy of the same copy engine: 0.07 ms.
_MAX_COPY_BYTES = 4 << 20

# Under WSL the driver refuses a mapping while Windows cannot make the memory resident: for a
# moment, or because less can be resident than is free (microsoft/WSL#41176). The attempts wait for
# 1, 2, 4 … 64 ms, and then 64 ms each: 2 s in all.
_NOT_READY = "CUDA_ERROR_NOT_READY"
_NUM_ATTEMPTS = 36
_MOST_WAIT_S = 0.064


class CudaError(RuntimeError):
    """A driver call failed. The device's state is unknown, so the process should end."""

    def __init__(self, call: str, code: str, message: str) -> None:
        super().__init__(f"{call} failed: {code}: {message}")
        self.call = call
        self.code = code


class CudaDriver:
    """Driver calls on one device's primary context, by NVIDIA's ``cuda-bindings``.

    Handles, addresses and streams are ints. Every method raises :class:`CudaError`. Copies and
    fills are asynchronous. ``sleep`` waits for seconds between attempts.

    Raises Failed: the package is not installed.
    """

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise Failed(
                f"CUDA devices need the package cuda-bindings: {error}", "pip install gpupool[cuda]"
            ) from error
        self._driver: Any = driver
        self._device: Any = None
        self._context: Any = None
        self._allocation: Any = None
        self._access: Any = None
        self._attributes: Any = None
        self._has_waited = False
        self._sleep = sleep

    def open(self, device_index: int) -> None:
        """Retain the device's primary context, which torch uses; make it current in this thread."""
        cuda = self._driver
        try:
            self._call("cuInit", 0)
        except CudaError as error:
            error.add_note(INIT_REMEDIES.get(error.code, _OTHER_REMEDY))
            raise
        self._device = self._call("cuDeviceGet", device_index)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._call("cuCtxSetCurrent", self._context)
        location = cuda.CUmemLocation()
        location.type = cuda.CUmemLocationType(_ON_DEVICE)
        location.id = device_index
        self._allocation = cuda.CUmemAllocationProp()
        self._allocation.type = cuda.CUmemAllocationType(_PINNED)
        self._allocation.location = location
        self._access = cuda.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = cuda.CUmemAccess_flags(_READ_WRITE)
        self._attributes = cuda.CUmemcpyAttributes()
        self._attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder(_STREAM_ORDER)

    def bind_thread(self) -> None:
        """Make the context current in the calling thread, which must not capture graphs.

        The thread's calls are then permitted while another thread captures a graph, and do not
        break the capture.
        """
        self._call("cuCtxSetCurrent", self._context)
        mode = self._driver.CUstreamCaptureMode(_OWN_CAPTURES)
        self._call("cuThreadExchangeStreamCaptureMode", mode)

    def close(self) -> None:
        self._call("cuDevicePrimaryCtxRelease", self._device)

    def pci_bus_id(self) -> str:
        """Return the device's PCI address as ``domain:bus:device.function``."""
        found: bytes = self._call("cuDeviceGetPCIBusId", _BUS_ID_BYTES, self._device)
        return found.partition(b"\0")[0].decode()  # padding follows

    def memory_info(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def granularity(self) -> int:
        """Return the granularity of sizes and addresses of mappings in bytes."""
        minimum = self._driver.CUmemAllocationGranularity_flags(0)
        return int(self._call("cuMemGetAllocationGranularity", self._allocation, minimum))

    def create(self, num_bytes: int) -> int:
        """Create physical memory; return the handle."""
        return int(self._call("cuMemCreate", num_bytes, self._allocation, 0))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def reserve_addresses(self, num_bytes: int, alignment: int) -> int:
        """Reserve addresses without memory; return the first address."""
        return int(self._call("cuMemAddressReserve", num_bytes, alignment, 0, 0))

    def free_addresses(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", address, num_bytes)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Map physical memory at an address; inaccessible until ``allow_access``."""
        self._call_when_ready("cuMemMap", address, num_bytes, 0, handle, 0)

    def allow_access(self, address: int, num_bytes: int) -> None:
        """Let the device read and write a fully mapped range."""
        self._call_when_ready("cuMemSetAccess", address, num_bytes, [self._access], 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", address, num_bytes)

    def copy_in(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy from host to device, in stream order."""
        self._call("cuMemcpyHtoDAsync", target, source, num_bytes, stream)

    def copy_out(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy from device to host, in stream order."""
        self._call("cuMemcpyDtoHAsync", target, source, num_bytes, stream)

    def can_copy_batches(self) -> bool:
        """Return whether ``copy_batch`` works with this driver."""
        return int(self._call("cuDriverGetVersion")) >= _BATCH_COPY_VERSION

    def copy_batch(self, copies: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Copy ``(target, source, num_bytes)`` in stream order, in any order within the batch.

        The stream must not be the legacy default stream, and no copy empty. One bad copy fails the
        whole call.
        """
        pointer = self._driver.CUdeviceptr
        targets = [pointer(target) for target, _, _ in copies]
        sources = [pointer(source) for _, source, _ in copies]
        sizes = [num_bytes for _, _, num_bytes in copies]
        # One set of attributes, which applies to all copies from index 0 on.
        self._call(
            "cuMemcpyBatchAsync",
            *(targets, sources, sizes, len(copies)),
            *([self._attributes], [0], 1),
            stream,
        )

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        """Set bytes to ``value``, in stream order."""
        self._call("cuMemsetD8Async", address, value, num_bytes, stream)

    def create_stream(self) -> int:
        """Create a stream without implicit order to other streams."""
        return int(self._call("cuStreamCreate", _NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def synchronize_stream(self, stream: int) -> None:
        """Return when all work of a stream has ended; 0 is the legacy default stream."""
        self._call("cuStreamSynchronize", stream)

    def create_event(self) -> int:
        """Create an event for which streams can wait."""
        return int(self._call("cuEventCreate", _NO_TIMING))

    def create_host_event(self) -> int:
        """Create an event for which threads wait asleep, without spinning."""
        return int(self._call("cuEventCreate", _NO_TIMING | _SLEEPS))

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def record_event(self, event: int, stream: int) -> None:
        """Record the stream's present work in the event.

        Earlier waiters are not affected, so an event can be reused.
        """
        self._call("cuEventRecord", event, stream)

    def synchronize_event(self, event: int) -> None:
        """Return when the work recorded in the event has finished."""
        self._call("cuEventSynchronize", event)

    def wait_event(self, stream: int, event: int) -> None:
        """Make later work of the stream wait for the work now recorded in the event."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def register_host(self, address: int, num_bytes: int) -> None:
        self._call("cuMemHostRegister", address, num_bytes, 0)

    def unregister_host(self, address: int) -> None:
        """Undo ``register_host`` of the same address."""
        self._call("cuMemHostUnregister", address)

    def _call_when_ready(self, name: str, *arguments: Any) -> None:
        """Call a function, again for 2 s while the driver is not ready; log the first wait."""
        for attempt in itertools.count():
            try:
                self._call(name, *arguments)
            except CudaError as error:
                if error.code != _NOT_READY:
                    raise
                if attempt == _NUM_ATTEMPTS:
                    error.add_note("less memory can be resident than is free: raise memory.reserve")
                    raise
                if not self._has_waited:
                    _logger.warning("%s; calls are repeated, and further waits not logged", error)
                    self._has_waited = True
                self._sleep(min(_MOST_WAIT_S, 0.001 * 2**attempt))
            else:
                return

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver; raise an exception for an error code."""
        try:
            status, *results = getattr(self._driver, name)(*arguments)
        except RuntimeError as error:  # the bindings find no driver library
            raise CudaError(name, "no CUDA driver", str(error)) from error
        if int(status) != 0:
            _, text = self._driver.cuGetErrorString(status)
            message = text.decode() if text else "the driver has no text for this error"
            raise CudaError(name, str(status.name), message)
        return results[0] if len(results) == 1 else results


class CudaCopyStream:
    """A copy stream backed by a CUDA stream; every method raises ``CudaError``.

    No copy crosses the bounds of a registration. The turn loop's thread calls ``fence``, any thread
    ``close``, and the copy stream's thread all other methods. ``is_bound``: the context is current
    in that thread.

    A batch of copies is one driver call if the driver supports batches: separate calls cost 4 us
    each, which would limit blocks of 32 KiB to 8 GB/s. Inside a batch call, host-to-device copies
    below 28 KiB are slow too (7 GB/s; 44 GB/s above), so callers join adjacent pieces. One bad copy
    fails the whole call, hence no copy is empty.
    """

    def __init__(
        self,
        driver: CudaDriver,
        direction: Direction,
        compute_streams: Callable[[], Iterable[int]],
        *,
        is_bound: bool = False,
    ) -> None:
        self._driver = driver
        self._is_in = direction is Direction.IN
        self._compute_streams = compute_streams
        self._is_bound = is_bound
        self._can_batch = driver.can_copy_batches()
        self._stream = driver.create_stream()
        self._fence_events = _EventPool(driver.create_event)
        self._batch_events = _EventPool(driver.create_host_event)
        # Fences for which the stream does not wait yet: the turn loop's thread appends, the copy
        # stream's thread removes.
        self._fences: deque[tuple[int, list[int]]] = deque()
        self._num_fences = 0
        self._batches: deque[tuple[int, int]] = deque()  # not yet known to have finished
        self._num_batches = 0

    def fence(self) -> int:
        events = []
        for stream in self._compute_streams():
            events.append(self._fence_events.take())
            self._driver.record_event(events[-1], stream)
        self._num_fences += 1
        self._fences.append((self._num_fences, events))
        return self._num_fences

    def begin(self, copies: Sequence[Copy], after: int) -> int:
        if not self._is_bound:
            self._driver.bind_thread()
            self._is_bound = True
        self._pass_fences(after)
        parts = [part for copy in copies for part in _parts(copy)]
        if self._can_batch and len(parts) > 1:
            for first in range(0, len(parts), _MAX_COPIES_PER_CALL):
                self._driver.copy_batch(parts[first : first + _MAX_COPIES_PER_CALL], self._stream)
        else:
            copy_one = self._driver.copy_in if self._is_in else self._driver.copy_out
            for target, source, num_bytes in parts:
                copy_one(target, source, num_bytes, self._stream)
        event = self._batch_events.take()
        self._driver.record_event(event, self._stream)
        self._num_batches += 1
        self._batches.append((self._num_batches, event))
        return self._num_batches

    def wait(self, batch: int) -> None:
        assert batch <= self._num_batches, f"batch {batch} has not been begun"
        events = []
        while self._batches and self._batches[0][0] <= batch:
            events.append(self._batches.popleft()[1])
        if events:
            self._driver.synchronize_event(events[-1])  # a stream's work ends in order
            self._batch_events.give_back(events)

    def close(self) -> None:
        """Close the copy stream after waiting for all batches."""
        self._driver.bind_thread()
        self._driver.synchronize_stream(self._stream)
        fences = (event for _, events in self._fences for event in events)
        batches = (event for _, event in self._batches)
        pooled = (*self._fence_events.events, *self._batch_events.events)
        for event in (*fences, *batches, *pooled):
            self._driver.destroy_event(event)
        self._driver.destroy_stream(self._stream)

    def _pass_fences(self, last: int) -> None:
        """Make the stream wait for all fences up to ``last``.

        The engines' streams vary from fence to fence, so the last fence may not cover earlier ones.
        """
        assert last <= self._num_fences, f"there is no fence {last}"
        while self._fences and self._fences[0][0] <= last:
            _, events = self._fences.popleft()
            for event in events:
                self._driver.wait_event(self._stream, event)
            # The events can be reused: the stream waits for their state at the time of the call.
            self._fence_events.give_back(events)


def _parts(copy: Copy) -> Iterator[Copy]:
    target, source, num_bytes = copy
    for at in range(0, num_bytes, _MAX_COPY_BYTES):
        yield Copy(target + at, source + at, min(_MAX_COPY_BYTES, num_bytes - at))


class _EventPool:
    """A pool of reusable events, for two threads."""

    def __init__(self, create: Callable[[], int]) -> None:
        self._create = create
        self.events: deque[int] = deque()

    def take(self) -> int:
        try:
            return self.events.popleft()
        except IndexError:
            return self._create()

    def give_back(self, events: Iterable[int]) -> None:
        self.events.extend(events)
