"""Transfers of large files through Xet, the chunked store behind the Hugging Face hub.

A Xet stream has the file's bytes in order from any offset, fetched by ``hf_xet`` over several
connections, so downloads resume, stop and are checked as with plain HTTP. Files of more than 50 GB
are available through Xet only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpupoold.checkpoints.hub import Hub, HubFile, Interrupted
from gpupoold.errors import GpupoolError

if TYPE_CHECKING:
    from huggingface_hub.utils._xet import XetFileData

_logger = logging.getLogger(__name__)

# Bounds of host memory and waiting times; hf_xet allows itself 6.3 GB and minutes.
_OPTIONS = {
    "client.connect_timeout": "10s",
    "client.read_timeout": "20s",
    "client.retry_base_delay": "500ms",
    "client.retry_max_attempts": 2,
    "reconstruction.download_buffer_limit": 1_000_000_000,
    "reconstruction.download_buffer_perfile_size": 128_000_000,
    "reconstruction.download_buffer_size": 512_000_000,
    "reconstruction.min_prefetch_buffer": 256_000_000,
    "telemetry.enabled": False,
}
_SCHEMES = {"https": ("https",), "http": ("http", "https")}


class Xet:
    """The Xet storage of a repository, for one download.

    After a transfer without a single byte, as behind a firewall, the storage counts as unusable,
    and the files come by plain HTTP. Thread-safe.
    """

    def __init__(self, hub: Hub, commit: str) -> None:
        self._hub = hub
        self._commit = commit
        self._lock = threading.Lock()
        self._session: Any = None
        self._is_usable = True
        self._places: dict[str, XetFileData | None] = {}

    def has(self, file: HubFile) -> XetFileData | None:
        """Return the address of a file in the storage.

        None if the hub states none, the storage cannot be used, or ``HF_HUB_DISABLE_XET`` is set.
        """
        from huggingface_hub.utils._runtime import is_xet_available

        if not self._is_usable or not is_xet_available():
            return None
        if file.path not in self._places:
            try:
                stated = self._hub.file_facts(self._commit, file.path).xet
            except (Interrupted, GpupoolError):  # the transfer by HTTP reports the reason
                return None
            if stated is not None and urlsplit(stated.refresh_route).netloc != self._hub.netloc:
                stated = None  # the token is for the hub only
            self._places[file.path] = stated
        return self._places[file.path]

    @contextmanager
    def open_file(
        self, file: HubFile, place: XetFileData, offset: int
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Open a file from ``offset`` on, as :meth:`Hub.open_file`.

        Raises Interrupted: try again; the next try may use plain HTTP.
        """
        try:
            stream = self._stream(file, place, offset)
        except Exception as error:  # of the storage, the hub or the network: HTTP is the other way
            raise self._failed(error, has_begun=False) from error
        yield offset, self._chunks(stream)

    def give_up(self, reason: str) -> None:
        """Use plain HTTP for all transfers that begin from now on."""
        with self._lock:
            if self._is_usable and any(self._places.values()):
                _logger.warning("%s: HTTP instead of Xet storage: %s", self._hub.repo_id, reason)
            self._is_usable = False

    def abort(self) -> None:
        """End all transfers at once; the storage is unusable then."""
        with self._lock:
            self._is_usable = False
            session, self._session = self._session, None
        if session is not None:
            session.sigint_abort()

    def _chunks(self, stream: Iterator[bytes]) -> Iterator[bytes]:
        has_begun = False
        try:
            for chunk in stream:
                has_begun = True
                yield chunk
        except Exception as error:
            raise self._failed(error, has_begun=has_begun) from error
        if not has_begun:
            raise self._failed(ConnectionError("the storage sent nothing"), has_begun=False)

    def _failed(self, error: Exception, *, has_begun: bool) -> Interrupted:
        if not has_begun:
            self.give_up(str(error))
        return Interrupted(f"Xet storage: {error}")

    def _stream(self, file: HubFile, place: XetFileData, offset: int) -> Iterator[bytes]:
        from hf_xet import XetFileInfo
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public
        from huggingface_hub.utils._xet import refresh_xet_connection_info

        headers = build_hf_headers(library_name="gpupool")
        access = refresh_xet_connection_info(file_data=place, headers=headers)
        # The address comes from the hub; hf_xet would also open folders of this machine.
        if urlsplit(access.endpoint).scheme not in _SCHEMES[self._hub.scheme]:
            raise ValueError(f"the hub names {access.endpoint!r} as the storage's address")
        group = self._opened_session().new_download_stream_group(
            endpoint=access.endpoint,
            token=access.access_token,
            token_expiry_unix_secs=access.expiration_unix_epoch,
            token_refresh_url=place.refresh_route,
            token_refresh_headers=headers,
        )
        info = XetFileInfo(place.file_hash, file.num_bytes)
        stream: Iterator[bytes] = group.download_stream(info, start=offset)
        return stream

    def _opened_session(self) -> Any:
        from hf_xet import XetConfig, XetSession

        with self._lock:
            if not self._is_usable:
                raise ConnectionError("the transfers have ended")
            if self._session is None:
                self._session = XetSession(XetConfig().with_config(_OPTIONS))
            return self._session
