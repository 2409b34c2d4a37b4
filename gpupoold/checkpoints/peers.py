"""Checkpoints from other nodes of the fleet.

A node serves its finished downloads to the nodes that have the fleet's secret, at
``/fleet/checkpoints/ORG/NAME`` (the list of files) and ``/fleet/checkpoints/ORG/NAME/COMMIT/FILE``.
"""

from __future__ import annotations

import functools
import logging
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import quote, urlencode

import httpx
import msgspec

from gpupoold.access.fleet import HEADER, sign, verified
from gpupoold.checkpoints.hub import READ_TIMEOUT_S, FileFacts, Hub, HubFile, Interrupted
from gpupoold.errors import Failed, GpupoolError

_logger = logging.getLogger(__name__)

PATH = "/fleet/checkpoints/"
LISTING_METHOD = "LISTING"
"""Stands for the method in the signature of a list of files."""
MAX_LISTING_BYTES = 16 << 20
# Smaller checkpoints come from the first peer, without a measurement.
_MEASURES_FROM_BYTES = 64 << 20
_MEASURED_BYTES = 8 << 20
_MEASURED_S = 2.0


class Listing(msgspec.Struct):
    """The files of a finished download."""

    commit: str
    files: list[HubFile]


@dataclass(frozen=True, slots=True)
class Peers:
    """The addresses of nodes that may have a checkpoint, and the fleet's secret."""

    urls: Sequence[str] = ()
    secret: str = field(default="", repr=False)

    def hubs(self, hub: Hub) -> list[PeerHub]:
        """Return the peers in the hub's place; none without a fleet."""
        urls = self.urls if self.secret else ()
        return [PeerHub(hub.repo_id, hub.model_dirs, url, self.secret) for url in urls]


_certificates = functools.cache(ssl.create_default_context)


@dataclass(frozen=True)
class PeerHub(Hub):
    """A repository in a peer's finished downloads; ``endpoint`` is the peer's address."""

    secret: str = field(default="", repr=False)

    def list_files(self, revision: str | None) -> tuple[str, tuple[HubFile, ...]]:
        """Return commit and files of the peer's download of a revision.

        Raises Failed: the peer has no finished download, cannot be reached, or lacks the secret.
        """
        path = f"{PATH}{self.repo_id}"
        query = f"?{urlencode({'revision': revision})}" if revision else ""
        try:
            with self._opened(path, query, {}) as response:
                body = _whole(response)
        except (Interrupted, httpx.HTTPError) as error:
            raise Failed(str(error)) from error
        signature = verified(
            self.secret, LISTING_METHOD, path + query, response.headers.get(HEADER, "")
        )
        if signature is None or not signature.covers(body):
            raise Failed(f"{self.endpoint} is no node of this fleet")
        try:
            found = msgspec.json.decode(body, type=Listing)
        except msgspec.MsgspecError as error:
            raise Failed(f"{self.endpoint} lists no files: {error}") from error
        return found.commit, tuple(found.files)

    def file_facts(self, commit: str, path: str) -> FileFacts:
        """Return no facts: the listing has sizes and digests, and a peer has no Xet storage."""
        return FileFacts(None, None)

    @contextmanager
    def open_file(
        self, commit: str, path: str, offset: int, num_bytes: int | None = None
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Open a file of the peer, as :meth:`Hub.open_file`.

        Raises Interrupted: the peer does not have the file, or the connection broke.
        """
        last = offset + num_bytes - 1 if num_bytes else ""
        headers = {"range": f"bytes={offset}-{last}"} if offset or num_bytes else {}
        try:
            target = f"{PATH}{self.repo_id}/{commit}/{path}"
            with self._opened(target, "", headers) as response:
                start = offset if response.status_code == httpx.codes.PARTIAL_CONTENT else 0
                yield start, response.iter_bytes()
        except httpx.HTTPError as error:
            raise Interrupted(f"{self.endpoint}: {error or type(error).__name__}") from error

    @contextmanager
    def _opened(self, path: str, query: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        signed = {HEADER: sign(self.secret, "GET", path, b""), "accept-encoding": "identity"}
        url = self.endpoint + quote(path) + query
        # With the certificates of the machine, and no proxy: nodes are neighbours.
        with httpx.stream(
            "GET",
            url,
            headers=signed | headers,
            timeout=READ_TIMEOUT_S,
            verify=_certificates(),
            trust_env=False,
        ) as response:
            if response.is_error:
                raise Interrupted(f"{self.endpoint} answers HTTP {response.status_code}")
            yield response


def _whole(response: httpx.Response) -> bytes:
    body = bytearray()
    for part in response.iter_bytes():
        body += part
        if len(body) > MAX_LISTING_BYTES:
            raise Interrupted(f"a list of files has more than {MAX_LISTING_BYTES:,} bytes")
    return bytes(body)


class Sources:
    """The quickest source of a download's weights: a peer, or the hub. Thread-safe."""

    def __init__(self, peers: Sequence[PeerHub]) -> None:
        self._peers = list(peers)

    @property
    def best(self) -> PeerHub | None:
        """The peer to ask, None for the hub."""
        peers = self._peers
        return peers[0] if peers else None

    def drop(self, peer: PeerHub | None = None) -> None:
        """Ask a peer no more; None drops all peers."""
        self._peers = [hub for hub in self._peers if peer not in (None, hub)]

    def measure(self, hub: Hub, commit: str, files: Sequence[HubFile]) -> None:
        """Compare the peers with the hub by the beginning of the largest file."""
        largest = max(files, key=lambda file: file.num_bytes, default=None)
        if not self._peers or largest is None or largest.num_bytes < _MEASURES_FROM_BYTES:
            return
        rates = {peer: _rate(peer, commit, largest.path) for peer in self._peers}
        of_hub = _rate(hub, commit, largest.path)
        quicker = [peer for peer in self._peers if rates[peer] and rates[peer] >= of_hub]
        self._peers = sorted(quicker, key=lambda peer: -rates[peer])
        shown = ", ".join(f"{peer.endpoint} {rates[peer] / 1e6:.0f} MB/s" for peer in rates)
        _logger.info("%s: %s; the hub %.0f MB/s", hub.repo_id, shown, of_hub / 1e6)


def _rate(hub: Hub, commit: str, path: str) -> float:
    """Return the bytes per second of a source, 0 if the source does not answer."""
    began_s, num_bytes = time.monotonic(), 0
    try:
        with hub.open_file(commit, path, 0, _MEASURED_BYTES) as (_, chunks):
            for chunk in chunks:
                num_bytes += len(chunk)
                if num_bytes >= _MEASURED_BYTES or time.monotonic() - began_s > _MEASURED_S:
                    break
    except (Interrupted, GpupoolError):
        return 0.0
    return num_bytes / max(1e-6, time.monotonic() - began_s)
