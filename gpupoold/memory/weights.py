"""A model's weights: an image in host memory, a region on the device."""

from __future__ import annotations

from gpupoold.memory.contracts import Device
from gpupoold.memory.host import HostBuffer
from gpupoold.memory.regions import Region
from gpupoold.memory.transfers import Copy, Transfer, TransferQueue


class WeightMemory:
    """Maps the weight region and fills it from the image; never copies back.

    The pages from the first on are there, as many as there was room for: a model that
    comes back after a part of it has been evicted moves that part only. ``image`` holds
    the region's bytes as vLLM left them after loading and post-processing, padded to
    whole pages. It is pinned from here to ``close``.
    """

    def __init__(self, region: Region, device: Device, image: HostBuffer) -> None:
        assert image.num_bytes == region.num_pages * device.page_bytes
        self.image = image
        self._region = region
        self._device = device
        self._num_loaded = 0
        self._arriving: Transfer | None = None
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
    def num_mapped_pages(self) -> int:
        """Pages of the pool that it has, filled or being filled."""
        return self._region.num_mapped

    @property
    def mapped_bytes(self) -> int:
        """Bytes of these pages."""
        return self.num_mapped_pages * self._device.page_bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes from the start on that are known to be there."""
        return self._num_loaded * self._device.page_bytes

    @property
    def num_missing_pages(self) -> int:
        """Pages of the pool that it still needs."""
        return self.num_pages - self.num_mapped_pages

    @property
    def missing_bytes(self) -> int:
        """Bytes that are neither there nor on the way."""
        return self.num_missing_pages * self._device.page_bytes

    @property
    def is_resident(self) -> bool:
        """Whether all of it is there, so that the model can run."""
        return self._num_loaded == self.num_pages

    @property
    def is_arriving(self) -> bool:
        """Whether pages are still being filled."""
        return self._arriving is not None and not self._arriving.has_ended

    @property
    def address(self) -> int:
        """Where the weights are whenever they are resident."""
        return self._region.address

    def load(self) -> int:
        """Make the weights resident; returns the bytes copied (0 when all were there).

        What was begun before is waited for and not counted.

        Raises:
            OutOfPages: the pool is short; what was there or on the way still is.
        """
        self.wait()
        missing = range(self._num_loaded, self.num_pages)
        if not missing:
            return 0
        offset = self.loaded_bytes
        self._region.retain(missing, self.image.address + offset)
        self._device.synchronize()
        self._num_loaded = self.num_pages
        return self.num_bytes - offset

    def begin_load(self, queue: TransferQueue, num_pages: int) -> None:
        """Start to fill the next ``num_pages``, or those that are left if they are fewer.

        Raises:
            OutOfPages: the pool is short; nothing was begun.
        """
        self.wait()
        page_bytes = self._device.page_bytes
        pages = range(self._num_loaded, min(self._num_loaded + num_pages, self.num_pages))
        if not pages:
            return
        self._region.retain(pages, is_filled=False)
        offset = pages.start * page_bytes
        copy = Copy(self.address + offset, self.image.address + offset, len(pages) * page_bytes)
        self._arriving = queue.begin(copy)

    def wait(self) -> None:
        """Return when what was begun has arrived.

        Raises:
            Exception: a copy failed; what had not arrived was given back.
        """
        if self._arriving is None:
            return
        try:
            self._arriving.wait()
        except BaseException:
            self.stop()
            raise
        self._arriving = None
        self._num_loaded = self._region.num_mapped

    def stop(self) -> None:
        """End a load that was begun; pages that have not been filled are given back."""
        if self._arriving is None:
            return
        self._num_loaded += self._arriving.stop() // self._device.page_bytes
        self._arriving = None
        self._drop_from(self._num_loaded)

    def evict(self, num_pages: int | None = None) -> None:
        """Give back ``num_pages``, the last ones, or all; what was on its way is stopped."""
        kept = 0 if num_pages is None else max(0, self.num_mapped_pages - num_pages)
        self.stop()
        self._num_loaded = min(self._num_loaded, kept)
        self._drop_from(self._num_loaded)

    def close(self) -> None:
        """Unmap, release the addresses and this process's view of the image."""
        self.stop()
        self._region.close()
        self._device.unpin(self.image.address, self.image.num_bytes)
        self.image.close()

    def _drop_from(self, first: int) -> None:
        pages = range(first, self._region.num_mapped)
        if pages:
            self._region.drop(pages)
