"""The places where a worker keeps and finds KV of ended requests beside the device."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from gpupoold.memory.host import KvHostCache
from gpupoold.memory.prefix_fetcher import PrefixFetcher
from gpupoold.memory.prefix_files import PrefixFiles, PrefixWriter
from gpupoold.memory.prefix_peers import PeerPrefixes
from gpupoold.memory.prefix_store import PrefixStore
from gpupoold.memory.prefix_table import CacheBytes, owners_of
from gpupoold.system.folders import filesystem_of, is_shared

_logger = logging.getLogger(__name__)


class PrefixTiers:
    """The worker's own host memory, the host memory of other workers, and files.

    Without memory for prefixes there are none.
    """

    def __init__(
        self,
        host: KvHostCache,
        budget_bytes: int | None = None,
        folder: Path | None = None,
        files_bytes: int = 0,
    ) -> None:
        """For ``budget_bytes`` see :class:`PrefixStore`; ``folder`` has files if given."""
        self._host = host
        self.fetcher: PrefixFetcher | None = None
        self._files: PrefixFiles | None = None
        self._writer: PrefixWriter | None = None
        if not host.budget_bytes or budget_bytes == 0:
            return
        store = PrefixStore(host, budget_bytes)
        cache = CacheBytes(host.fd, host.shape)
        self.fetcher = PrefixFetcher(store, cache)
        if folder is None or not files_bytes:
            return
        if is_shared(filesystem := filesystem_of(folder)):
            text = "no KV is kept in %s: other machines may read files on %s"
            _logger.error(text, folder, filesystem)
        else:
            self._files = PrefixFiles(folder, files_bytes, host.shape.num_ranks)
            self._writer = PrefixWriter(store, cache, self._files)
            self.fetcher.add("files", self._files)

    @property
    def wake_fds(self) -> list[int]:
        """Descriptors that become readable when a fetch has ended, until ``clear``."""
        return [] if self.fetcher is None else [self.fetcher.wake_fd]

    def clear(self) -> None:
        """Make ``wake_fds`` unreadable."""
        if self.fetcher is not None:
            self.fetcher.clear()

    def poll(self) -> None:
        """Begin to write further KV to files; to be called a few times a second."""
        if self._writer is not None:
            self._writer.poll()

    def peer_up(self, device_number: int, fd: int) -> None:
        """Read the host memory of another worker from now on; close ``fd``."""
        try:
            if self.fetcher is not None:
                self.fetcher.add(device_number, PeerPrefixes(fd, self._host.shape))
        except (OSError, ValueError) as error:
            _logger.info("no prefixes of worker %d are read: %s", device_number, error)
        finally:
            os.close(fd)

    def forget(self, model: str) -> None:
        """Free the KV of a model's ended requests."""
        if self.fetcher is not None:
            self.fetcher.store.forget(owners_of(model))
        if self._files is not None:
            self._files.forget(owners_of(model))
