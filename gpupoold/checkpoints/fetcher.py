"""The transfer of files of one commit: in parallel, resumed, checked, each with retries."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from gpupoold.checkpoints import layout
from gpupoold.checkpoints.hub import Hub, HubFile, Interrupted, RangeRefused
from gpupoold.checkpoints.peers import PeerHub, Sources
from gpupoold.checkpoints.xet import Xet
from gpupoold.errors import Failed
from gpupoold.files import replace_durably, sync

_logger = logging.getLogger(__name__)

PART_FOLDER = ".gpupool-parts"
NUM_PARALLEL_FILES = 4
MAX_FRUITLESS_ATTEMPTS = 5
FIRST_RETRY_S = 1.0
_SHA256_DIGITS = 64
_HASH_CHUNK_BYTES = 1 << 20

ProgressCallback = Callable[[int, int, float | None], None]
"""Called with the bytes that are here, the bytes in total, and the bytes per second.

The rate is None before the first seconds of a transfer.
"""

REPORT_INTERVAL_S = 0.1
_RATE_WINDOW_S = 10.0
_MIN_RATE_S = 0.5


class Stopped(Exception):
    """Another file failed, or the download was cancelled."""


class Stop:
    """The wish to end a download, for all its threads."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._xet: Xet | None = None

    def ends(self, xet: Xet) -> None:
        """End the transfers of ``xet`` with the download."""
        self._xet = xet
        if self.event.is_set():
            xet.abort()

    def set(self) -> None:
        self.event.set()
        if self._xet is not None:
            self._xet.abort()


class Fetcher:
    """Fetches files of one commit into a folder; an incomplete file is in ``PART_FOLDER``.

    Weights come from a peer that is quicker than the hub, else through Xet where the hub offers
    Xet; other files come by plain HTTP.
    """

    def __init__(
        self, hub: Hub, commit: str, target_dir: Path, stop: Stop, peers: Sequence[PeerHub] = ()
    ) -> None:
        self.progress = DownloadProgress(0, lambda _done, _total, _rate: None)
        self._hub = hub
        self._commit = commit
        self._target_dir = target_dir
        self._stop = stop
        self._xet = Xet(hub, commit)
        self._sources = Sources(peers)

    def is_done(self, file: HubFile) -> bool:
        return has_size(self._target_dir / file.path, file.num_bytes)

    def part_bytes(self, file: HubFile) -> int:
        try:
            return self._part(file).stat().st_size
        except FileNotFoundError:  # not begun, or complete since a moment ago
            return 0

    def missing_bytes(self, file: HubFile) -> int:
        """Return the bytes of a file that are not in the folder."""
        return 0 if self.is_done(file) else max(0, file.num_bytes - self.part_bytes(file))

    def fetch_all(self, files: Sequence[HubFile]) -> None:
        """Fetch files in parallel.

        Raises:
            Failed: the hub's reason, or a file arrived damaged twice.
            OSError: a file cannot be written.
            Stopped: the download was cancelled.
        """
        self._stop.ends(self._xet)
        weights = [file for file in files if layout.is_weight_file(file.path)]
        self._sources.measure(self._hub, self._commit, weights)
        with ThreadPoolExecutor(NUM_PARALLEL_FILES, thread_name_prefix="download") as pool:
            futures = [pool.submit(self._fetch, file) for file in files]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            errors = [error for future in done if (error := future.exception())]
            if errors:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise next((e for e in errors if not isinstance(e, Stopped)), errors[0])

    def _part(self, file: HubFile) -> Path:
        # The digest keeps a part of one version from being continued with another version.
        name = f"{file.path.replace('/', '--')}.{file.digest[:16]}"
        return self._target_dir / PART_FOLDER / name

    def _fetch(self, file: HubFile) -> None:
        part = self._part(file)
        part.touch()
        self.progress.found(self.part_bytes(file))
        self._grow(file, part)
        if not self._is_intact(file, part):
            # The damage may be in an earlier run's part, or in what one of two ways delivers.
            _logger.warning("%s of %s is damaged: fetched again", file.path, self._hub.repo_id)
            self._xet.give_up("a file arrived damaged")
            self._sources.drop()
            self._start_over(part)
            self._grow(file, part)
            if not self._is_intact(file, part):
                part.unlink()
                raise Failed(
                    f"{file.path} of {self._hub.repo_id} arrived damaged twice "
                    "(its checksum is wrong)",
                    "try again; if it happens again, suspect the disk or a proxy",
                )
        target = self._target_dir / file.path
        target.parent.mkdir(exist_ok=True)
        replace_durably(part, target)

    def _grow(self, file: HubFile, part: Path) -> None:
        """Append to the partial file until complete, with retries."""
        num_fruitless = 0
        while (had_bytes := part.stat().st_size) != file.num_bytes:
            try:
                self._transfer(file, part)
            except RangeRefused:
                self._start_over(part)
                num_fruitless += 1
            except Interrupted as error:
                num_fruitless = 0 if part.stat().st_size > had_bytes else num_fruitless + 1
                if num_fruitless >= MAX_FRUITLESS_ATTEMPTS:
                    raise Failed(
                        f"downloading {file.path}: {error}",
                        "the downloaded part is kept; try again later to continue",
                    ) from error
                if self._stop.event.wait(FIRST_RETRY_S * 2**num_fruitless):
                    raise Stopped from error
            if num_fruitless >= MAX_FRUITLESS_ATTEMPTS:
                raise Failed(f"downloading {file.path}: the hub refuses to continue the file")

    def _transfer(self, file: HubFile, part: Path) -> None:
        offset = part.stat().st_size
        if offset > file.num_bytes:
            raise RangeRefused
        peer = self._sources.best if layout.is_weight_file(file.path) else None
        try:
            with self._opened(file, offset, peer) as (start, chunks):
                if start != offset:
                    self._start_over(part)
                self._append(file, part, start, chunks)
            if part.stat().st_size < file.num_bytes:
                raise Interrupted("the connection closed early")
        except (Interrupted, Failed) as error:
            if peer is None:
                raise
            _logger.warning("%s of %s: %s", file.path, self._hub.repo_id, error)
            self._sources.drop(peer)

    def _opened(
        self, file: HubFile, offset: int, peer: PeerHub | None
    ) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        if peer is not None:
            return peer.open_file(self._commit, file.path, offset)
        place = self._xet.has(file) if layout.is_weight_file(file.path) else None
        if place is not None:
            return self._xet.open_file(file, place, offset)
        return self._hub.open_file(self._commit, file.path, offset)

    def _append(self, file: HubFile, part: Path, size: int, chunks: Iterator[bytes]) -> None:
        with part.open("ab") as output:
            for chunk in chunks:
                if self._stop.event.is_set():
                    raise Stopped
                size += len(chunk)
                if size > file.num_bytes:
                    raise Failed(
                        f"{file.path}: the hub sends more than the announced {file.num_bytes} bytes"
                    )
                output.write(chunk)
                self.progress.received(len(chunk))
        sync(part)

    def _start_over(self, part: Path) -> None:
        self.progress.found(-part.stat().st_size)
        os.truncate(part, 0)

    def _is_intact(self, file: HubFile, part: Path) -> bool:
        """Return whether a file's SHA-256, or for small files git's SHA-1 of a blob, is correct."""
        if not file.digest:  # the mirror sends no digest
            return True
        if len(file.digest) == _SHA256_DIGITS:
            digest = hashlib.sha256()
        else:
            digest = hashlib.sha1(f"blob {file.num_bytes}\0".encode(), usedforsecurity=False)
        with part.open("rb") as content:
            while chunk := content.read(_HASH_CHUNK_BYTES):
                if self._stop.event.is_set():
                    raise Stopped
                digest.update(chunk)
        return digest.hexdigest() == file.digest


def has_size(path: Path, num_bytes: int) -> bool:
    return os.path.isfile(path) and path.stat().st_size == num_bytes


@dataclass(eq=False)
class DownloadProgress:
    """Downloaded bytes, shared by the threads; reports at most every ``REPORT_INTERVAL_S``.

    ``clock`` returns seconds.
    """

    total_bytes: int
    report: ProgressCallback
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _done_bytes: int = field(default=0, init=False)
    _received_bytes: int = field(default=0, init=False)
    _next_report_at: float = field(default=0.0, init=False)
    _samples: deque[tuple[float, int]] = field(default_factory=deque, init=False)

    def found(self, num_bytes: int) -> None:
        """Count bytes of an earlier transfer; a negative number for bytes that were dropped."""
        with self._lock:
            self._done_bytes += num_bytes
            self._tell()

    def received(self, num_bytes: int) -> None:
        """Count bytes that have just arrived."""
        with self._lock:
            self._done_bytes += num_bytes
            self._received_bytes += num_bytes
            self._tell()

    def _tell(self) -> None:
        now = self.clock()
        if now >= self._next_report_at or self._done_bytes == self.total_bytes:
            self._next_report_at = now + REPORT_INTERVAL_S
            self.report(self._done_bytes, self.total_bytes, self._rate(now))

    def _rate(self, now: float) -> float | None:
        samples = self._samples
        samples.append((now, self._received_bytes))
        while len(samples) > 2 and samples[1][0] < now - _RATE_WINDOW_S:
            samples.popleft()
        since, before_bytes = samples[0]
        if now - since < _MIN_RATE_S:
            return None
        return (self._received_bytes - before_bytes) / (now - since)
