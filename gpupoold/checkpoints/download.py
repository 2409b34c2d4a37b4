"""Resumable download of a checkpoint from the Hugging Face hub, with progress.

``huggingface_hub.snapshot_download`` is not used: the function drops the bytes of an interrupted
file, and without a connection accepts any non-empty folder as a finished download.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gpupoold.checkpoints import layout
from gpupoold.checkpoints.adapter_check import check_adapter_config
from gpupoold.checkpoints.check import check_config
from gpupoold.checkpoints.headers import HEADERS_FOLDER, fetch_headers
from gpupoold.checkpoints.hub import Hub, Interrupted, RangeRefused
from gpupoold.checkpoints.manifest import (
    MANIFEST_FILE,
    HubFile,
    Manifest,
    read_manifest,
    write_manifest,
)
from gpupoold.checkpoints.selection import Content, choose_files
from gpupoold.errors import Failed, Refused
from gpupoold.system import durable
from gpupoold.system.folders import hint_to_write
from gpupoold.units import format_bytes

ProgressCallback = Callable[[int, int], None]
Part = Literal["all", "small files"]

PART_FOLDER = ".gpupool-parts"
LOCK_FILE = ".gpupool-download.lock"
NUM_PARALLEL_FILES = 4
MAX_FRUITLESS_ATTEMPTS = 5
FIRST_RETRY_S = 1.0
REPORT_INTERVAL_S = 0.1
_SHA256_DIGITS = 64
_HASH_CHUNK_BYTES = 1 << 20


class _Stopped(Exception):
    """Another file failed, or the download was cancelled."""


def checkpoint_dir(download_dir: Path, repo_id: str, revision: str | None = None) -> Path:
    """Return the folder in ``download_dir`` for a revision of a repository."""
    name = repo_id.replace("/", "--")
    suffix = f"@{revision.replace('/', '--')}" if revision else ""
    return download_dir / f"{name}{suffix}"


async def download(
    repo_id: str,
    revision: str | None,
    target_dir: Path,
    on_progress: ProgressCallback,
    *,
    allow_pickle: bool = False,
    allow_remote_code: bool = False,
    model_dirs: Sequence[Path] = (),
    part: Part = "all",
    content: Content = "checkpoint",
) -> Path:
    """Download a repository's checkpoint or adapter to ``target_dir`` and return that folder.

    The part ``small files`` is everything but the weights, of which only the headers are fetched
    (see :func:`~gpupoold.checkpoints.headers.remote_weights`); a later call fetches the rest.

    A finished download of the same revision is returned at once, without a network; an interrupted
    download is resumed. ``on_progress(done_bytes, total_bytes)`` is called in the running event
    loop. Cancelling stops within one read timeout and keeps the downloaded bytes. ``model_dirs``
    appear in hints.

    Raises:
        Refused: no such repository or revision, no access, no permitted file, no disk space, or the
            folder has other content.
        Failed: the hub cannot be reached or the transfer keeps failing.
        UsageError: the repository id is malformed.
    """
    loop = asyncio.get_running_loop()

    def report(done_bytes: int, total_bytes: int) -> None:
        loop.call_soon_threadsafe(on_progress, done_bytes, total_bytes)

    job = _Download(
        hub=Hub(repo_id, tuple(model_dirs)),
        revision=revision,
        target_dir=target_dir,
        allow_pickle=allow_pickle,
        allow_remote_code=allow_remote_code,
        report=report,
        part=part,
        content=content,
    )
    task = asyncio.create_task(asyncio.to_thread(job.run))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        job.stop.set()
        await asyncio.wait([task])
        task.exception()  # retrieved, so that asyncio does not warn
        raise


@dataclass
class _Progress:
    """Downloaded bytes, shared by the threads; reports at most every ``REPORT_INTERVAL_S``."""

    total_bytes: int
    report: ProgressCallback
    done_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _next_report_at: float = 0.0

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done_bytes += num_bytes
            now = time.monotonic()
            if now >= self._next_report_at or self.done_bytes == self.total_bytes:
                self._next_report_at = now + REPORT_INTERVAL_S
                self.report(self.done_bytes, self.total_bytes)


@dataclass
class _Download:
    """One run of a download, in a separate thread."""

    hub: Hub
    revision: str | None
    target_dir: Path
    allow_pickle: bool
    allow_remote_code: bool
    report: ProgressCallback
    part: Part = "all"
    content: Content = "checkpoint"
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> Path:
        try:
            found = self._found()
            if found is not None and found.complete and self._has_all(found):
                return self.target_dir
            self.target_dir.mkdir(parents=True, exist_ok=True)
            durable.sync(self.target_dir.parent)
            with self._locked():
                self._fetch(self._plan(found))
        except OSError as error:
            raise Failed(
                f"cannot write {error.filename or self.target_dir}: {error.strerror or error}",
                hint_to_write(self.target_dir.parent),
            ) from error
        except _Stopped:
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

    def _has_all(self, manifest: Manifest) -> bool:
        return all(_has_size(self.target_dir / f.path, f.num_bytes) for f in manifest.files)

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
        commit, listed = self.hub.list_files(self._commit_to_continue(found) or self.revision)
        if found is not None and found.commit != commit:
            self._discard(found)
        wanted = choose_files(
            self.hub.repo_id,
            [file.path for file in listed],
            self.content,
            allow_pickle=self.allow_pickle,
            allow_remote_code=self.allow_remote_code,
        )
        files = tuple(file for file in listed if file.path in wanted)
        return Manifest(self.hub.repo_id, self.revision, commit, files)

    def _commit_to_continue(self, found: Manifest | None) -> str | None:
        """Return the commit of an earlier run; None if that run fetched no weights.

        A check long ago must not decide which version is downloaded now.
        """
        if found is None:
            return None
        fetcher = _Fetcher(self.hub, found.commit, self.target_dir, self.stop)
        weights = [file for file in found.files if layout.is_weight_file(file.path)]
        has_begun = any(fetcher.is_done(one) or fetcher.part_bytes(one) for one in weights)
        return found.commit if has_begun or self.part == "all" else None

    def _discard(self, found: Manifest) -> None:
        """Remove the small files of another commit."""
        for file in found.files:
            (self.target_dir / file.path).unlink(missing_ok=True)
        for folder in (PART_FOLDER, HEADERS_FOLDER):
            shutil.rmtree(self.target_dir / folder, ignore_errors=True)

    def _check_small_files(self) -> None:
        """Refuse a bad configuration before the weights are fetched."""
        if self.content == "adapter":
            check_adapter_config(self.target_dir)
        else:
            check_config(self.target_dir, allow_remote_code=self.allow_remote_code)

    def _fetch(self, manifest: Manifest) -> None:
        parts = self.target_dir / PART_FOLDER
        parts.mkdir(exist_ok=True)
        write_manifest(self.target_dir, manifest)
        fetcher = _Fetcher(self.hub, manifest.commit, self.target_dir, self.stop)
        missing = [file for file in manifest.files if not fetcher.is_done(file)]
        self._require_space(sum(f.num_bytes - fetcher.part_bytes(f) for f in missing))
        small = [f for f in manifest.files if not layout.is_weight_file(f.path)]
        wanted = small if self.part == "small files" else manifest.files
        fetcher.progress = _Progress(sum(f.num_bytes for f in wanted), self.report)
        fetcher.progress.add(sum(f.num_bytes for f in wanted if f not in missing))
        fetcher.fetch_all([f for f in missing if f in small])
        self._check_small_files()
        if self.part == "small files":
            fetch_headers(self.hub, manifest, self.target_dir, self.stop)
            return
        fetcher.fetch_all([f for f in missing if f not in small])
        shutil.rmtree(parts)
        shutil.rmtree(self.target_dir / HEADERS_FOLDER, ignore_errors=True)
        write_manifest(self.target_dir, replace(manifest, complete=True))

    def _require_space(self, needed_bytes: int) -> None:
        free_bytes = shutil.disk_usage(self.target_dir).free
        if needed_bytes > free_bytes:
            raise Refused(
                f"{self.hub.repo_id} needs {format_bytes(needed_bytes)} more, but only "
                f"{format_bytes(free_bytes)} is free at {self.target_dir}",
                "free some space or set paths.download_dir to a larger disk",
            )


class _Fetcher:
    """Fetches files of one commit into a folder; an incomplete file is in ``PART_FOLDER``."""

    def __init__(self, hub: Hub, commit: str, target_dir: Path, stop: threading.Event) -> None:
        self.progress = _Progress(0, lambda _done, _total: None)
        self._hub = hub
        self._commit = commit
        self._target_dir = target_dir
        self._stop = stop

    def is_done(self, file: HubFile) -> bool:
        return _has_size(self._target_dir / file.path, file.num_bytes)

    def part_bytes(self, file: HubFile) -> int:
        part = self._part(file)
        return part.stat().st_size if part.exists() else 0

    def fetch_all(self, files: Sequence[HubFile]) -> None:
        with ThreadPoolExecutor(NUM_PARALLEL_FILES, thread_name_prefix="download") as pool:
            futures = [pool.submit(self._fetch, file) for file in files]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            errors = [error for future in done if (error := future.exception())]
            if errors:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise next((e for e in errors if not isinstance(e, _Stopped)), errors[0])

    def _part(self, file: HubFile) -> Path:
        # The digest keeps a part of one version from being continued with another version.
        name = f"{file.path.replace('/', '--')}.{file.digest[:16]}"
        return self._target_dir / PART_FOLDER / name

    def _fetch(self, file: HubFile) -> None:
        part = self._part(file)
        part.touch()
        self.progress.add(self.part_bytes(file))
        self._grow(file, part)
        if not self._is_intact(file, part):
            part.unlink()
            raise Failed(
                f"{file.path} of {self._hub.repo_id} arrived damaged (its checksum is wrong)",
                "try again; if it happens again, suspect the disk or a proxy",
            )
        target = self._target_dir / file.path
        target.parent.mkdir(exist_ok=True)
        durable.replace(part, target)

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
                if self._stop.wait(FIRST_RETRY_S * 2**num_fruitless):
                    raise _Stopped from error
            if num_fruitless >= MAX_FRUITLESS_ATTEMPTS:
                raise Failed(f"downloading {file.path}: the hub refuses to continue the file")

    def _transfer(self, file: HubFile, part: Path) -> None:
        offset = part.stat().st_size
        if offset > file.num_bytes:
            raise RangeRefused
        with self._hub.open_file(self._commit, file.path, offset) as (start, chunks):
            if start != offset:
                self._start_over(part)
            self._append(file, part, start, chunks)
        if part.stat().st_size < file.num_bytes:
            raise Interrupted("the connection closed early")

    def _append(self, file: HubFile, part: Path, size: int, chunks: Iterator[bytes]) -> None:
        with part.open("ab") as output:
            for chunk in chunks:
                if self._stop.is_set():
                    raise _Stopped
                size += len(chunk)
                if size > file.num_bytes:
                    raise Failed(
                        f"{file.path}: the hub sends more than the announced {file.num_bytes} bytes"
                    )
                output.write(chunk)
                self.progress.add(len(chunk))
        durable.sync(part)

    def _start_over(self, part: Path) -> None:
        self.progress.add(-part.stat().st_size)
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
                if self._stop.is_set():
                    raise _Stopped
                digest.update(chunk)
        return digest.hexdigest() == file.digest


def _has_size(path: Path, num_bytes: int) -> bool:
    return os.path.isfile(path) and path.stat().st_size == num_bytes
