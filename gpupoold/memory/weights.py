"""A model's weights: an image in host memory, a region on the device."""

from __future__ import annotations

from gpupoold.memory.contracts import Device
from gpupoold.memory.host import HostBuffer
from gpupoold.memory.regions import Region


class WeightMemory:
    """Maps the weight region and fills it from the image; never copies back.

    ``image`` holds the region's bytes as vLLM left them after loading and
    post-processing, padded to whole pages. It is pinned from here to ``close``.
    """

    def __init__(self, region: Region, device: Device, image: HostBuffer) -> None:
        assert image.num_bytes == region.num_pages * device.page_bytes
        self.image = image
        self._region = region
        self._device = device
        self.is_resident = False
        device.pin(image.address, image.num_bytes)

    @property
    def num_pages(self) -> int:
        """Pages of the whole image."""
        return self._region.num_pages

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole image."""
        return self.image.num_bytes

    @property
    def address(self) -> int:
        """Where the weights are whenever they are resident."""
        return self._region.address

    def load(self) -> int:
        """Make the weights resident; returns the bytes copied (0 when they already were).

        Raises:
            OutOfPages: the pool is short; nothing was changed.
        """
        if self.is_resident:
            return 0
        self._region.retain(range(self.num_pages), self.image.address)
        self._device.synchronize()
        self.is_resident = True
        return self.num_bytes

    def evict(self) -> None:
        """Give the pages back."""
        if self.is_resident:
            self._region.drop(range(self.num_pages))
            self.is_resident = False

    def close(self) -> None:
        """Unmap, release the addresses and this process's view of the image."""
        self._region.close()
        self._device.unpin(self.image.address, self.image.num_bytes)
        self.image.close()
