"""KV of ended requests in files, which outlives the daemon and the machine's memory.

A file has some blocks of an owner: a header of 4096 bytes, then block after block, each rank after
rank. The header is:

    0     8  magic number
    8     8  bytes of a block on a rank
    16    4  number of ranks
    20    4  number of blocks, at most 8
    24   32  owner
    56  288  keys, 36 bytes each
    344 256  BLAKE3 of each block, 32 bytes each
    600  32  BLAKE3 of the header before

A file is written under another name first, and its name is its first key, so several workers may
write to one folder. All workers delete the least recently used files beyond the common budget.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from gpupoold.memory.host import KEY_BYTES, MAX_BLOCKS, NUM_DIGITS, OWNER_BYTES, CacheBytes
from gpupoold.memory.prefix_store import PrefixStore, StoredBlocks
from gpupoold.memory.slabs import BlockPlace

_logger = logging.getLogger(__name__)

_HEADER_BYTES = 4096
_MAGIC = int.from_bytes(b"gpkvfil1", "little")
_DIGEST_BYTES = 32
_HEADER = struct.Struct(
    f"<QQII{OWNER_BYTES}s{KEY_BYTES * MAX_BLOCKS}s{_DIGEST_BYTES * MAX_BLOCKS}s"
)
# Files are deleted until so much of the budget is free.
_FREE_SHARE = 1 / 16
_NEW = ".new"
# Copies that are kept from eviction at a time to be written: so many bytes, or this share.
_BATCH_BYTES, _BATCH_SHARE = 256 << 20, 1 / 8


class FileBlock(NamedTuple):
    """A block in a file: its position among the file's blocks, and its digest."""

    path: Path
    position: int
    block_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class _FileHeader:
    block_bytes: int
    num_ranks: int
    owner: bytes
    keys: list[bytes]
    digests: list[bytes]

    def pack(self) -> bytes:
        keys, digests = b"".join(self.keys), b"".join(self.digests)
        fields = self.block_bytes, self.num_ranks, len(self.keys), self.owner, keys, digests
        packed = _HEADER.pack(_MAGIC, *fields)
        return (packed + blake3(packed).digest()).ljust(_HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, packed: bytes) -> _FileHeader | None:
        """Return the header, None if the bytes are no header."""
        if len(packed) < _HEADER.size + _DIGEST_BYTES:
            return None
        fields = _HEADER.unpack_from(packed)
        digest = packed[_HEADER.size : _HEADER.size + _DIGEST_BYTES]
        if fields[0] != _MAGIC or blake3(packed[: _HEADER.size]).digest() != digest:
            return None
        _, block_bytes, num_ranks, num_blocks, owner, keys, digests = fields
        return cls(
            block_bytes,
            num_ranks,
            owner,
            _parts(keys, KEY_BYTES, num_blocks),
            _parts(digests, _DIGEST_BYTES, num_blocks),
        )


class PrefixFiles:
    """Files in a folder, within a byte budget; a source of a :class:`PrefixTiers`.

    One thread calls the methods, except ``copy``; reading folders and writing files take place in a
    thread of this object.
    """

    tier = "file"

    def __init__(self, folder: Path, budget_bytes: int, num_ranks: int) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes  # for all workers together
        self._num_ranks = num_ranks
        self._blocks: dict[str, dict[bytes, FileBlock]] = {}
        self._known: dict[str, set[str]] = {}  # names of the files read, by owner
        self._seen_ns: dict[str, int] = {}  # time of the folder's latest change that was seen
        self._reading: dict[str, Future[dict[bytes, FileBlock]]] = {}
        self._thread = ThreadPoolExecutor(1, "prefix-files")
        self._unseen_bytes = budget_bytes  # written since the folder's size was seen
        self._useless: deque[Path] = deque()  # files that are gone or damaged
        self._forgotten: set[str] = set()  # models whose files under way are not to be written

    def refresh(self, owner: str) -> None:
        """Take note of files of an owner, once another thread has read their headers."""
        self._forgotten.discard(owner[:NUM_DIGITS])
        while self._useless:
            self._forget_file(self._useless.popleft())
        reading = self._reading.get(owner)
        if reading is not None:
            if not reading.done():
                return
            del self._reading[owner]
            self._blocks.setdefault(owner, {}).update(reading.result())
        with contextlib.suppress(OSError):
            changed_ns = os.stat(self._folder_of(owner)).st_mtime_ns
            if changed_ns != self._seen_ns.get(owner):
                self._seen_ns[owner] = changed_ns
                known = self._known.setdefault(owner, set())
                self._reading[owner] = self._thread.submit(self._read, owner, known)

    def find(self, owner: str, key: bytes) -> FileBlock | None:
        """Return the place of a block; the file may be gone."""
        return self._blocks.get(owner, {}).get(key)

    def copy(self, found: FileBlock, to: CacheBytes, place: BlockPlace, num_bytes: int) -> bool:
        """Read a block; return False if the file is gone or damaged, which is then deleted."""
        is_right = found.block_bytes == num_bytes and self._read_block(found, to, place)
        if not is_right:
            self._useless.append(found.path)
            with contextlib.suppress(OSError):
                found.path.unlink()
        return is_right

    def _read_block(self, found: FileBlock, to: CacheBytes, place: BlockPlace) -> bool:
        num_bytes = found.block_bytes
        offset = _HEADER_BYTES + found.position * num_bytes * self._num_ranks
        digest = blake3()
        try:
            with found.path.open("rb", buffering=0) as file:
                for view in to.views(place, num_bytes):
                    if os.preadv(file.fileno(), [view], offset) != num_bytes:
                        return False
                    digest.update(view)
                    offset += num_bytes
            if found.position == 0:
                os.utime(found.path)
        except FileNotFoundError:
            return False
        return digest.digest() == found.digest

    def write(
        self,
        owner: str,
        keys: Sequence[bytes],
        source: CacheBytes,
        places: Sequence[BlockPlace],
        num_bytes: int,
    ) -> Future[None]:
        """Start to write blocks of ``num_bytes`` on each rank to a file."""
        return self._thread.submit(self._write, owner, list(keys), source, list(places), num_bytes)

    def forget(self, model: str) -> None:
        """Delete the files of the owners whose names begin with ``model``."""
        self._forgotten.add(model)
        for owner in [owner for owner in self._known if owner.startswith(model)]:
            self._blocks.pop(owner, None)
            self._known.pop(owner, None)
            self._seen_ns.pop(owner, None)
            self._reading.pop(owner, None)
        self._thread.submit(remove_files, self._folder, model)

    def close(self) -> None:
        """Finish the files begun."""
        self._thread.shutdown(cancel_futures=True)

    def _forget_file(self, path: Path) -> None:
        for owner, blocks in self._blocks.items():
            if self._folder_of(owner) == path.parent:
                for key in [key for key, block in blocks.items() if block.path == path]:
                    del blocks[key]
                self._known.get(owner, set()).discard(path.name)

    def _folder_of(self, owner: str) -> Path:
        return self._folder / owner[:NUM_DIGITS] / owner[NUM_DIGITS:]

    def _read(self, owner: str, known: set[str]) -> dict[bytes, FileBlock]:
        """Read the headers of files whose names are not ``known``, in the thread."""
        blocks = {}
        with contextlib.suppress(OSError), os.scandir(self._folder_of(owner)) as entries:
            for name in [entry.name for entry in entries if _NEW not in entry.name]:
                if name not in known:
                    known.add(name)
                    blocks.update(self._blocks_of(self._folder_of(owner) / name, owner))
        return blocks

    def _blocks_of(self, path: Path, owner: str) -> dict[bytes, FileBlock]:
        try:
            with path.open("rb") as file:
                header = _FileHeader.unpack(file.read(_HEADER_BYTES))
        except OSError:
            return {}  # another worker has deleted the file
        if header is None or header.owner.hex() != owner or header.num_ranks != self._num_ranks:
            with contextlib.suppress(OSError):
                path.unlink()  # damaged: else the blocks could not be written again
            return {}
        numbered = enumerate(zip(header.keys, header.digests, strict=True))
        size = header.block_bytes
        return {key: FileBlock(path, at, size, digest) for at, (key, digest) in numbered}

    def _write(
        self,
        owner: str,
        keys: list[bytes],
        source: CacheBytes,
        places: list[BlockPlace],
        num_bytes: int,
    ) -> None:
        folder = self._folder_of(owner)
        path = folder / keys[0].hex()
        if path.exists() or owner[:NUM_DIGITS] in self._forgotten:
            return
        try:
            for one in (self._folder, folder.parent, folder):
                one.mkdir(mode=0o700, exist_ok=True)
            temporary = path.with_suffix(f"{_NEW}{os.getpid()}")
            blocks = [source.views(place, num_bytes) for place in places]
            digests = [_digest_of(views) for views in blocks]
            header = _FileHeader(num_bytes, self._num_ranks, bytes.fromhex(owner), keys, digests)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                    file.write(header.pack())
                    for view in itertools.chain.from_iterable(blocks):
                        file.write(view)
                temporary.rename(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            self._unseen_bytes += _HEADER_BYTES + len(keys) * num_bytes * self._num_ranks
            if self._unseen_bytes > _FREE_SHARE / 2 * self._budget_bytes:
                self._unseen_bytes = 0
                _trim(self._folder, self._budget_bytes)
        except OSError as error:
            _logger.warning("KV of an earlier request is not saved in %s: %s", folder, error)


@dataclass(eq=False)
class PrefixWriter:
    """Writes the copies of a :class:`PrefixStore`, behind the requests; for one thread.

    Copies are written in the order of their arrival, each once. ``cache`` has the bytes of the
    store's cache.
    """

    store: PrefixStore
    cache: CacheBytes
    files: PrefixFiles

    def __post_init__(self) -> None:
        self._batch_bytes = min(_BATCH_BYTES, int(_BATCH_SHARE * self.cache.shape.budget_bytes))
        self.store.keeps_unwritten = True
        self._under_way: list[tuple[Future[None], StoredBlocks]] = []

    def poll(self) -> None:
        """Begin to write further copies if the ones before are written."""
        if any(not written.done() for written, _ in self._under_way):
            return
        for written, copies in self._under_way:
            copies.free()
            if error := written.exception():
                _logger.error("KV of an earlier request is not saved: %r", error)
        self._under_way = [
            (self.files.write(owner, keys, self.cache, copies.places, num_bytes), copies)
            for owner, keys, num_bytes, copies in self.store.take_unwritten(self._batch_bytes)
        ]


def remove_files(folder: Path, model: str) -> None:
    """Delete the files of the owners whose names begin with ``model``."""
    for path in _files(folder / model):
        with contextlib.suppress(OSError):
            path.unlink()


def _trim(folder: Path, budget_bytes: int) -> None:
    found = []
    for path in _files(folder):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
    left_bytes = sum(num_bytes for _, num_bytes, _ in found)
    if left_bytes <= budget_bytes * (1 - _FREE_SHARE):
        return
    for _, num_bytes, path in sorted(found):
        if left_bytes <= budget_bytes * (1 - 2 * _FREE_SHARE):
            return
        with contextlib.suppress(OSError):
            path.unlink()
        left_bytes -= num_bytes


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent) / name


def _digest_of(views: Sequence[memoryview]) -> bytes:
    digest = blake3()
    for view in views:
        digest.update(view)
    return digest.digest()


def _parts(joined: bytes, num_bytes: int, count: int) -> list[bytes]:
    return [joined[at : at + num_bytes] for at in range(0, count * num_bytes, num_bytes)]
