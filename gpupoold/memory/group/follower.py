"""A follower's memory: carries out the leader's orders on the follower's own device."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

from gpupoold.memory.device import Device, Direction, Fence
from gpupoold.memory.group.device import (
    Fences,
    FollowerCopyStream,
    FollowerRegions,
    PlacedMapping,
    RegionPlace,
)
from gpupoold.memory.group.link import Link, OrderCount
from gpupoold.memory.host import HostBuffer


class FollowerMemory:
    """The methods that the leader's device orders; see :class:`GroupDevice` for each."""

    def __init__(self, device: Device, rank: int, done: OrderCount) -> None:
        self._device = device
        self._rank = rank
        self._done = done
        self._fences: dict[int, Fence] = {}
        self._copy_fences = Fences()
        self._copy_streams: dict[int, FollowerCopyStream] = {}
        self.regions = FollowerRegions()

    def on_device(self, method: str, arguments: dict[str, Any]) -> None:
        """Call a method of the device, with addresses for places."""
        for name, value in arguments.items():
            if isinstance(value, RegionPlace):
                arguments[name] = self.regions.address(value)
        getattr(self._device, method)(**arguments)

    def unmap(self, mappings: Sequence[PlacedMapping], fence: int) -> None:
        last_use = self._fences.get(fence)
        addressed = [(self.regions.address(place), runs) for place, runs in mappings]
        self._device.unmap_each(addressed, last_use)

    def record_fence(self, number: int) -> None:
        if number not in self._fences:
            self._fences[number] = self._device.open_fence()
        self._fences[number].record()

    def close_fence(self, number: int) -> None:
        fence = self._fences.pop(number, None)
        if fence is not None:
            fence.close()

    def open_copy_stream(self, number: int, direction: Direction, fd: int) -> None:
        own = self._device.open_copy_stream(direction)
        stream = FollowerCopyStream(Link.of(fd), own, self.regions, self._copy_fences, self._done)
        self._copy_streams[number] = stream
        threading.Thread(target=stream.run, name="copy", daemon=True).start()

    def forget_copy_stream(self, number: int) -> None:
        """Forget a copy stream that the leader has closed, whose thread ends by itself."""
        del self._copy_streams[number]

    def record_copy_fence(self, stream: int, number: int) -> None:
        self._copy_streams[stream].record_fence(number)

    def map_host(self, number: int, num_bytes: int, fd: int) -> None:
        """Map and pin this rank's part of shared host memory, as a region."""
        buffer = HostBuffer(fd, num_bytes, self._rank * num_bytes, is_populated=False)
        self.pin_host(number, buffer)

    def pin_host(self, number: int, buffer: HostBuffer) -> None:
        """Pin a buffer, and register it as a region that owns the buffer."""
        self._device.pin(buffer.address, buffer.num_bytes)
        self.regions.add(number, buffer.address, functools.partial(self._unpin, buffer))

    def _unpin(self, buffer: HostBuffer) -> None:
        self._device.unpin(buffer.address, buffer.num_bytes)
        buffer.close()
