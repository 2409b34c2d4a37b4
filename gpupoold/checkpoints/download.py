"""Resumable download of a checkpoint from the Hugging Face hub, with progress.

Names, addresses, credentials, and errors are the library's (``huggingface_hub``, ``hf_xet``). Its
``snapshot_download`` is not used: the function drops the bytes of an interrupted file, compares no
checksum, cannot be cancelled, and fetches the weights before anything was checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gpupoold.checkpoints import layout
from gpupoold.checkpoints.adapter_check import check_adapter_config
from gpupoold.checkpoints.check import check_config
from gpupoold.checkpoints.fetcher import (
    PART_FOLDER,
    DownloadProgress,
    Fetcher,
    ProgressCallback,
    Stop,
    Stopped,
    has_size,
)
from gpupoold.checkpoints.hub import Hub, HubFile, Interrupted
from gpupoold.checkpoints.layout import Wanted
from gpupoold.checkpoints.manifest import (
    HEADERS_FOLDER,
    MANIFEST_FILE,
    Manifest,
    fetch_headers,
    read_manifest,
    write_manifest,
)
from gpupoold.checkpoints.peers import Peers
from gpupoold.errors import Failed, Refused
from gpupoold.files import hint_to_write, sync
from gpupoold.units import format_bytes

Part = Literal["all", "small files"]

LOCK_FILE = ".gpupool-download.lock"
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})

# Left free for the daemon's database and logs, which may be on the same disk.
KEPT_FREE_BYTES = 256 << 20

_lock = threading.Lock()
_promised: dict[object, tuple[int, Callable[[], int]]] = {}
"""The file system and the missing bytes of each download in progress."""


def checkpoint_dir(download_dir: Path, repo_id: str, revision: str | None = None) -> Path:
    name = repo_id.replace("/", "--")
    suffix = f"@{revision.replace('/', '--')}" if revision else ""
    return download_dir / f"{name}{suffix}"


def finished_downloads(download_dir: Path, repo_id: str) -> dict[Path, Manifest]:
    """Return the finished downloads of a repository, of all revisions, by folder."""
    found = {}
    try:
        names = [entry.name for entry in os.scandir(download_dir) if entry.is_dir()]
    except OSError:
        return {}
    for name in sorted(names):
        if name.partition("@")[0] == checkpoint_dir(download_dir, repo_id).name:
            manifest = read_manifest(download_dir / name)
            if manifest is not None and manifest.complete and manifest.repo_id == repo_id:
                found[download_dir / name] = manifest
    return found


@dataclass
class Download:
    """The download of a repository's checkpoint or adapter to a folder.

    The part ``small files`` is everything but the weights, of which only the headers are fetched
    (see :func:`~gpupoold.checkpoints.manifest.remote_weights`); a later run fetches the rest.

    A finished download of the same revision is returned at once, without a network; an interrupted
    download is resumed. ``on_progress`` (a :data:`ProgressCallback`) is called in the running event
    loop. Weights come from ``peers`` if quicker, and everything if the hub cannot be asked.
    """

    hub: Hub
    revision: str | None
    target_dir: Path
    on_progress: ProgressCallback
    wanted: Wanted
    part: Part = "all"
    peers: Peers = field(default_factory=Peers)
    _stop: Stop = field(default_factory=Stop, init=False)
    _loop: asyncio.AbstractEventLoop = field(init=False)

    async def run(self) -> Path:
        """Download in a separate thread, and return the folder.

        Cancelling stops within one read timeout and keeps the downloaded bytes.

        Raises:
            Refused: no such repository or revision, no access, no permitted file, no disk space, or
                the folder has other content.
            Failed: the hub cannot be reached or the transfer keeps failing.
            UsageError: the repository id is malformed.
        """
        self._loop = asyncio.get_running_loop()
        task = asyncio.create_task(asyncio.to_thread(self._run))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._stop.set()
            await asyncio.wait([task])
            task.exception()  # retrieved, so that asyncio does not warn
            raise

    def _report(self, done_bytes: int, total_bytes: int, bytes_per_s: float | None) -> None:
        self._loop.call_soon_threadsafe(self.on_progress, done_bytes, total_bytes, bytes_per_s)

    def _run(self) -> Path:
        try:
            found = self._found()
            if (
                found is not None
                and found.complete
                and all(has_size(self.target_dir / f.path, f.num_bytes) for f in found.files)
            ):
                return self.target_dir
            self.target_dir.mkdir(parents=True, exist_ok=True)
            sync(self.target_dir.parent)
            with self._locked():
                self._fetch(self._plan(found))
        except OSError as error:
            raise Failed(
                f"cannot write {error.filename or self.target_dir}: {error.strerror or error}",
                "the downloaded part is kept; free some space, then repeat the command"
                if error.errno in _NO_SPACE
                else hint_to_write(self.target_dir.parent),
            ) from error
        except Stopped:
            raise Failed(f"the download of {self.hub.repo_id} was stopped") from None
        return self.target_dir

    def _found(self) -> Manifest | None:
        """Return the manifest of an earlier run with the same goal."""
        manifest = read_manifest(self.target_dir)
        if manifest is not None:
            if (manifest.repo_id, manifest.revision) != (self.hub.repo_id, self.revision):
                raise Refused(
                    f"{self.target_dir} holds {manifest.repo_id} "
                    f"({manifest.revision or 'default revision'})",
                    "remove that folder first",
                )
            return manifest
        own = {MANIFEST_FILE, LOCK_FILE, PART_FOLDER, HEADERS_FOLDER, f"{MANIFEST_FILE}.new"}
        if os.path.isdir(self.target_dir) and set(os.listdir(self.target_dir)) - own:
            raise Refused(
                f"{self.target_dir} has files that were not downloaded by gpupool",
                "use the files with --source and this path, or remove the folder",
            )
        return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.target_dir / LOCK_FILE).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Refused(
                    f"{self.hub.repo_id} is being downloaded to {self.target_dir} already",
                    "wait for that download to finish",
                ) from None
            yield

    def _plan(self, found: Manifest | None) -> Manifest:
        commit, listed = self._list_files(self._commit_to_continue(found))
        if found is not None and found.commit != commit:
            self._discard(found)
        chosen = self.wanted.choose(self.hub.repo_id, [file.path for file in listed])
        files = tuple(self._sized(commit, file) for file in listed if file.path in chosen)
        return Manifest(self.hub.repo_id, self.revision, commit, files)

    def _list_files(self, commit: str | None) -> tuple[str, tuple[HubFile, ...]]:
        """Ask the hub, or else a peer, which then takes the hub's place."""
        try:
            return self.hub.list_files(commit or self.revision)
        except (Failed, Refused):
            for peer in self.peers.hubs(self.hub):
                with contextlib.suppress(Failed):
                    found = peer.list_files(self.revision)
                    if commit in (None, found[0]):
                        self.hub = peer
                        return found
            raise

    def _sized(self, commit: str, file: HubFile) -> HubFile:
        """Return a file with its size, asking for the size if the listing has none."""
        if file.num_bytes >= 0:
            return file
        try:
            facts = self.hub.file_facts(commit, file.path)
        except Interrupted as error:
            raise Failed(f"asking for the size of {file.path}: {error}", "try again") from error
        if facts.num_bytes is None or facts.num_bytes < 0:
            raise Failed(
                f"{self.hub.endpoint} does not state the size of {file.path}",
                "use another mirror in HF_ENDPOINT, or give --source PATH",
            )
        return replace(file, num_bytes=facts.num_bytes)

    def _commit_to_continue(self, found: Manifest | None) -> str | None:
        """Return the commit of an earlier run; None if that run fetched no weights.

        A check long ago must not decide which version is downloaded now.
        """
        if found is None:
            return None
        fetcher = Fetcher(self.hub, found.commit, self.target_dir, self._stop)
        weights = [file for file in found.files if layout.is_weight_file(file.path)]
        has_begun = any(fetcher.is_done(weight) or fetcher.part_bytes(weight) for weight in weights)
        return found.commit if has_begun or self.part == "all" else None

    def _discard(self, found: Manifest) -> None:
        for file in found.files:
            (self.target_dir / file.path).unlink(missing_ok=True)
        for folder in (PART_FOLDER, HEADERS_FOLDER):
            shutil.rmtree(self.target_dir / folder, ignore_errors=True)

    def _fetch(self, manifest: Manifest) -> None:
        (self.target_dir / PART_FOLDER).mkdir(exist_ok=True)
        write_manifest(self.target_dir, manifest)
        peers = self.peers.hubs(self.hub)
        fetcher = Fetcher(self.hub, manifest.commit, self.target_dir, self._stop, peers)
        total_bytes = sum(file.num_bytes for file in manifest.files)

        def missing_bytes() -> int:
            return sum(fetcher.missing_bytes(file) for file in manifest.files)

        with disk_room(self.hub.repo_id, self.target_dir, total_bytes, missing_bytes):
            self._fetch_files(manifest, fetcher)

    def _fetch_files(self, manifest: Manifest, fetcher: Fetcher) -> None:
        missing = [file for file in manifest.files if not fetcher.is_done(file)]
        small = [f for f in manifest.files if not layout.is_weight_file(f.path)]
        wanted = small if self.part == "small files" else manifest.files
        fetcher.progress = DownloadProgress(sum(f.num_bytes for f in wanted), self._report)
        fetcher.progress.found(sum(f.num_bytes for f in wanted if f not in missing))
        fetcher.fetch_all([f for f in missing if f in small])
        if self.wanted.content == "adapter":
            check_adapter_config(self.target_dir)
        else:
            check_config(self.target_dir, allow_remote_code=self.wanted.allow_remote_code)
        if self.part == "small files":
            fetch_headers(self.hub, manifest, self.target_dir, self._stop.event)
            return
        fetcher.fetch_all([f for f in missing if f not in small])
        shutil.rmtree(self.target_dir / PART_FOLDER)
        shutil.rmtree(self.target_dir / HEADERS_FOLDER, ignore_errors=True)
        write_manifest(self.target_dir, replace(manifest, complete=True))


@contextmanager
def disk_room(
    repo_id: str, folder: Path, total_bytes: int, missing_bytes: Callable[[], int]
) -> Iterator[None]:
    """Keep space for a download of ``total_bytes`` to ``folder`` inside the context.

    ``missing_bytes()`` of the download are not in the folder yet.

    Raises:
        Refused: the free space, without that of other downloads, is too small.
        OSError: the folder cannot be examined.
    """
    token, disk = object(), folder.stat().st_dev
    with _lock:
        others = sum(missing() for other, missing in _promised.values() if other == disk)
        free_bytes, wanted_bytes = shutil.disk_usage(folder).free, missing_bytes()
        short_bytes = wanted_bytes + others + KEPT_FREE_BYTES - free_bytes
        if wanted_bytes and short_bytes > 0:
            for_others = f" {format_bytes(others)} are for other downloads," if others else ""
            raise Refused(
                f"{repo_id} has {format_bytes(total_bytes)}, of which {format_bytes(wanted_bytes)} "
                f"is missing; {format_bytes(free_bytes)} is free at {folder},{for_others} and "
                f"{format_bytes(KEPT_FREE_BYTES)} must stay free",
                f"free {format_bytes(short_bytes)}, or set paths.download_dir to a larger disk",
            )
        _promised[token] = disk, missing_bytes
    try:
        yield
    finally:
        with _lock:
            del _promised[token]
