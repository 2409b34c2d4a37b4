"""A model's weights: an image in host memory, a region on the device."""

from __future__ import annotations

from gpupoold.errors import Failed
from gpupoold.memory.address_ranges import Region
from gpupoold.memory.contracts import Copy, Device
from gpupoold.memory.host import HostBuffer
from gpupoold.memory.transfers import Transfer, TransferQueue

_HINT = "warm the model: `gpupool cache warm`"


class WeightMemory:
    """Maps the weight region and fills it from the image; never copies back.

    The pages from the first on are there, as many as there was room for: a model that
    comes back after a part of it has been evicted moves that part only. ``image`` holds
    the region's bytes as vLLM left them after loading and post-processing, padded to
    whole pages. It is pinned from here to ``close``, or to where it is detached: without an
    image nothing is there and nothing can be brought in.
    """

    def __init__(self, region: Region, device: Device, image: HostBuffer) -> None:
        self._region = region
        self._device = device
        self._num_loaded = 0
        self._arriving: Transfer | None = None
        self._image: HostBuffer | None = None
        assert image.num_bytes == self.num_bytes
        device.pin(image.address, image.num_bytes)
        self._image = image

    @property
    def has_image(self) -> bool:
        """Whether its image is in host memory, so that it can be brought in."""
        return self._image is not None

    @property
    def image(self) -> HostBuffer:
        """The image.

        Raises:
            Failed: it has been detached.
        """
        if self._image is None:
            raise Failed("the image of these weights is not in host memory", _HINT)
        return self._image

    @property
    def num_pages(self) -> int:
        """Pages of the whole image."""
        return self._region.num_pages

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole image, also while there is none."""
        return self.num_pages * self._device.page_bytes

    @property
    def num_mapped_pages(self) -> int:
        """Pages of the pool that it has, filled or being filled."""
        return self._region.num_mapped

    @property
    def physical_pages(self) -> list[int]:
        """These pages."""
        return self._region.physical_pages

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

    def load(self, num_pages: int | None = None) -> int:
        """Bring in the next ``num_pages``, or all that are missing; returns the bytes copied.

        What was begun before is waited for and not counted.

        Raises:
            OutOfPages: the pool is short; what was there or on the way still is.
            Failed: there is no image.
        """
        self.wait()
        end = self.num_pages if num_pages is None else self._num_loaded + num_pages
        missing = range(self._num_loaded, min(end, self.num_pages))
        if not missing:
            return 0
        self._region.retain(missing, self.image.address + self.loaded_bytes)
        self._device.synchronize()
        self._num_loaded = missing.stop
        return len(missing) * self._device.page_bytes

    def begin_load(self, queue: TransferQueue, num_pages: int) -> None:
        """Start to fill the next ``num_pages``, or those that are left if they are fewer.

        Raises:
            OutOfPages: the pool is short; nothing was begun.
            Failed: there is no image.
        """
        self.wait()
        page_bytes = self._device.page_bytes
        pages = range(self._num_loaded, min(self._num_loaded + num_pages, self.num_pages))
        if not pages:
            return
        offset = pages.start * page_bytes
        copy = Copy(self.address + offset, self.image.address + offset, len(pages) * page_bytes)
        self._region.retain(pages, is_filled=False)
        self._arriving = queue.begin([copy])

    def settle(self) -> None:
        """Take note of what has arrived."""
        if not self.is_arriving:
            self.wait()

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

    def detach_image(self) -> HostBuffer:
        """Give back all pages and let the image go; the caller unpins and closes it.

        Raises:
            Failed: there is none.
        """
        image = self.image
        self.evict()
        self._image = None
        return image

    def attach_image(self, image: HostBuffer) -> None:
        """Have an image again: pinned by the caller, of the same model and layout."""
        assert self._image is None
        assert image.num_bytes == self.num_bytes
        self._image = image

    def close(self) -> None:
        """Unmap, release the addresses and this process's view of the image."""
        self.stop()
        self._region.close()
        if self._image is not None:
            self._device.unpin(self._image.address, self._image.num_bytes)
            self._image.close()

    def _drop_from(self, first: int) -> None:
        pages = range(first, self._region.num_mapped)
        if pages:
            self._region.drop(pages)
