"""Weights snapshots on disk, read by a restarted daemon instead of checkpoints.

A file is named ``<key>.snapshot`` after all inputs of the snapshot's bytes. A header of 4096 bytes,
which aligns the data to a page, precedes the snapshot as in memory:

    ====== ===== ==========================================================================
    offset bytes content
    ====== ===== ==========================================================================
    0      16    magic
    16     32    BLAKE3 of the rest of the header
    48     4048  JSON: format, key, num_bytes, layout_digest, self_check, checksum (hex);
                 padded with spaces
    4096         the data
    ====== ===== ==========================================================================

The checksum is the BLAKE3 of the BLAKE3s of the data's chunks of 16 MiB, in order: each reading
thread computes the digests of its chunks in the processor's cache.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import msgspec
from blake3 import blake3

from gpupoold.errors import Failed
from gpupoold.files import replace_durably
from gpupoold.memory.host_buffer import touch_pages
from gpupoold.memory.libc import NO_NODE, create_memfd, gets_huge_pages, prefer_nodes
from gpupoold.units import format_bytes

_logger = logging.getLogger(__name__)

FORMAT = 2
_MAGIC = b"gpupool snap.\r\n\0"
_TEXT_OFFSET = len(_MAGIC) + blake3.digest_size
_HEADER_BYTES = 4096
_CHUNK_BYTES = 16 << 20
# Size of a read and a write: small enough for a core's cache.
_PIECE_BYTES = 256 << 10
# A few threads use a disk fully; a core reads, checks and writes 1 to 2 GB/s.
_NUM_READERS = min(16, max(4, len(os.sched_getaffinity(0))))
_SNAPSHOT_SUFFIX = ".snapshot"
_DRAFT_SUFFIX = ".new"


@dataclass(frozen=True, slots=True)
class SavedSnapshot:
    """A snapshot read from disk; ``fd`` is a new memfd with the bytes, owned by the caller."""

    fd: int
    num_bytes: int
    layout_digest: str
    self_check: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A file in the folder, unchecked; ``saved_at`` is in seconds since the epoch."""

    key: str
    num_bytes: int
    saved_at: float


class _Versioned(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT


class _Header(_Versioned, frozen=True, kw_only=True):
    key: str
    num_bytes: int
    layout_digest: str
    self_check: tuple[int, ...]
    checksum: str


class _Damaged(Exception):
    """A damaged file; the text describes the damage."""


class SnapshotFiles:
    """The saved snapshots in a folder of one daemon. Every method blocks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Two saves at once would not be faster, and two models may have the same key.
        self._writing = threading.Lock()

    def save(self, key: str, fd: int, layout_digest: str, self_check: tuple[int, ...]) -> None:
        """Write the snapshot behind the memfd ``fd``, which the caller keeps, completely or not
        at all.

        Raises Failed: the disk is full, or writing failed.
        """
        path = self._path(key)
        draft = path.with_name(path.name + _DRAFT_SUFFIX)
        num_bytes = os.fstat(fd).st_size
        with self._writing:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _check_disk_space(path, num_bytes)
                draft.unlink(missing_ok=True)
                _write_draft(draft, key, fd, layout_digest, self_check)
                replace_durably(draft, path)
            except (OSError, ValueError) as error:
                raise Failed(
                    f"{path}: saving a snapshot of {format_bytes(num_bytes)} failed: {error}",
                    f"check that {self._folder} is writable and has free space",
                ) from error
            finally:
                _remove(draft)

    def load(self, key: str, nodes: Sequence[int] = (NO_NODE,)) -> SavedSnapshot | None:
        """Return the snapshot in a new memfd, None without an intact file.

        Equal parts of the memfd get memory of a NUMA node each. A damaged file is deleted; an
        unreadable file stays. The log has the reason.
        """
        path = self._path(key)
        try:
            return _read(path, key, nodes)
        except FileNotFoundError:
            return None
        except _Damaged as damage:
            _logger.warning("%s is damaged and will be deleted: %s", path, damage)
            _remove(path)
        except OSError as error:
            _logger.warning("%s could not be read: %s", path, error)
        return None

    def drop(self, key: str) -> None:
        """Delete a snapshot; log a failure."""
        _remove(self._path(key))

    def remove_others(self, wanted: Callable[[], Iterable[str]]) -> None:
        """Delete the snapshots without one of the ``wanted`` keys, and leftovers of interrupted
        saves.

        The keys are asked for between two saves, because a saved snapshot may have a new key.
        """
        with self._writing:
            keys = set(wanted())
            for path in self._folder.glob(f"*{_SNAPSHOT_SUFFIX}{_DRAFT_SUFFIX}"):
                _remove(path)
            for path in self._folder.glob(f"*{_SNAPSHOT_SUFFIX}"):
                if path.stem not in keys:
                    _remove(path)

    def list(self) -> list[SnapshotFile]:
        """Return all snapshots by key as listed in the folder, without reading the files."""
        found = []
        for path in sorted(self._folder.glob(f"*{_SNAPSHOT_SUFFIX}")):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # deleted meanwhile
            num_bytes = max(0, status.st_size - _HEADER_BYTES)
            found.append(SnapshotFile(path.stem, num_bytes, status.st_mtime))
        return found

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SNAPSHOT_SUFFIX}"


def _check_disk_space(path: Path, num_bytes: int) -> None:
    free_bytes = shutil.disk_usage(path.parent).free
    if _HEADER_BYTES + num_bytes > free_bytes:
        raise Failed(
            f"{path}: a snapshot of {format_bytes(num_bytes)} does not fit on the disk, "
            f"{format_bytes(free_bytes)} are free",
            f"make space in {path.parent}; until then the checkpoint is read at every start",
        )


def _write_draft(
    draft: Path, key: str, fd: int, layout_digest: str, self_check: tuple[int, ...]
) -> None:
    """Write the data, then the header: before, the file has no magic.

    Raises:
        OSError: writing failed.
        ValueError: the snapshot is empty, or the self-check does not fit in the header.
    """
    digests = []
    with (
        open(draft, "xb", buffering=0, opener=_private) as file,
        mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as data,
    ):
        file.seek(_HEADER_BYTES)
        for start in range(0, len(data), _CHUNK_BYTES):
            with data[start : start + _CHUNK_BYTES] as chunk:
                digests.append(blake3(chunk, max_threads=blake3.AUTO).digest())
                _write_all(file, chunk)
        header = _Header(
            key=key,
            num_bytes=len(data),
            layout_digest=layout_digest,
            self_check=self_check,
            checksum=_combined(digests),
        )
        file.seek(0)
        _write_all(file, memoryview(_encode(header)))


def _write_all(file: FileIO, data: memoryview) -> None:
    written = 0
    while written < len(data):
        written += file.write(data[written:])


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _read(path: Path, key: str, nodes: Sequence[int]) -> SavedSnapshot:
    """Return the snapshot in a new memfd.

    Raises:
        _Damaged: the file is damaged, or was saved under another key.
        OSError: the file could not be read, or there is too little memory.
    """
    with open(path, "rb", buffering=0) as file:
        header = _decode(os.pread(file.fileno(), _HEADER_BYTES, 0))
        if header.key != key:
            raise _Damaged(f"saved under the key {header.key}")
        wanted_bytes, file_bytes = _HEADER_BYTES + header.num_bytes, os.fstat(file.fileno()).st_size
        if file_bytes != wanted_bytes:
            raise _Damaged(f"{file_bytes} bytes instead of {wanted_bytes}")
        # Pages of 4 KiB come sooner without zeros, and huge pages only with zeros.
        make_pages = touch_pages if gets_huge_pages() else prefer_nodes
        populate = functools.partial(make_pages, nodes=nodes)
        fd = create_memfd("gpupool-snapshot", header.num_bytes, populate)
        try:
            _fill(fd, file.fileno(), header)
        except BaseException:
            os.close(fd)
            raise
    return SavedSnapshot(fd, header.num_bytes, header.layout_digest, header.self_check)


def _fill(fd: int, source: int, header: _Header) -> None:
    """Read the data of ``source`` into the memfd ``fd`` and verify the checksum."""

    def read_chunk(start: int) -> bytes:
        num_bytes = min(_CHUNK_BYTES, header.num_bytes - start)
        return _copy_chunk(fd, source, start, num_bytes)

    with ThreadPoolExecutor(_NUM_READERS, "read-snapshots") as readers:
        digests = readers.map(read_chunk, range(0, header.num_bytes, _CHUNK_BYTES))
        checksum = _combined(digests)
    if checksum != header.checksum:
        raise _Damaged(f"the data has the checksum {checksum} instead of {header.checksum}")


def _copy_chunk(fd: int, source: int, start: int, num_bytes: int) -> bytes:
    """Copy data from byte ``start`` to the same place in ``fd``; return the digest.

    Copies through a small buffer: with a mapping of the memfd the kernel would write twice, zeros
    first, and the digest would fetch all bytes from memory again.
    """
    digest = blake3()
    with memoryview(bytearray(min(_PIECE_BYTES, num_bytes))) as buffer:
        for offset in range(start, start + num_bytes, _PIECE_BYTES):
            with buffer[: min(_PIECE_BYTES, start + num_bytes - offset)] as piece:
                _read_at(source, piece, _HEADER_BYTES + offset)
                digest.update(piece)
                _write_at(fd, piece, offset)
    return digest.digest()


def _combined(digests: Iterable[bytes]) -> str:
    """Return the checksum of data whose chunks have these digests."""
    return blake3(b"".join(digests)).hexdigest()


def _read_at(source: int, piece: memoryview, offset: int) -> None:
    num_read = 0
    while num_read < len(piece):
        step = os.preadv(source, [piece[num_read:]], offset + num_read)
        if step == 0:
            raise _Damaged(f"the file ends at byte {offset + num_read}")
        num_read += step


def _write_at(fd: int, piece: memoryview, offset: int) -> None:
    written = 0
    while written < len(piece):
        written += os.pwrite(fd, piece[written:], offset + written)


def _encode(header: _Header) -> bytes:
    """Return the 4096 bytes of a header.

    Raises ValueError: the header is too long.
    """
    text = msgspec.json.encode(header).ljust(_HEADER_BYTES - _TEXT_OFFSET)
    block = _MAGIC + blake3(text).digest() + text
    if len(block) > _HEADER_BYTES:
        raise ValueError(f"the header has {len(block)} bytes, the limit is {_HEADER_BYTES}")
    return block


def _decode(block: bytes) -> _Header:
    """Parse the 4096 bytes of a header.

    Raises _Damaged: the header is invalid, damaged or of another format.
    """
    if len(block) < _HEADER_BYTES:
        raise _Damaged(f"only {len(block)} bytes")
    if not block.startswith(_MAGIC):
        raise _Damaged("the magic number of a snapshot is missing")
    text = block[_TEXT_OFFSET:]
    if blake3(text).digest() != block[len(_MAGIC) : _TEXT_OFFSET]:
        raise _Damaged("the header has a wrong checksum")
    try:
        found = msgspec.json.decode(text, type=_Versioned).format
        if found != FORMAT:
            raise _Damaged(f"format {found}, this gpupoold reads {FORMAT}")
        return msgspec.json.decode(text, type=_Header)
    except msgspec.DecodeError as error:
        raise _Damaged(f"invalid header: {error}") from error


def _remove(path: Path) -> None:
    """Delete a file if present; a failure only wastes space."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _logger.warning("%s could not be deleted: %s", path, error)
