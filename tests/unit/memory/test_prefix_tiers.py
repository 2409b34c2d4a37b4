"""KV of ended requests from other workers' memory and from files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.memory.host import CacheBytes, KvHostCache, owner_of, owners_of
from gpupoold.memory.kv_extents import KvRow
from gpupoold.memory.prefix_files import PrefixFiles, PrefixWriter, remove_files
from gpupoold.memory.prefix_store import PrefixStore
from gpupoold.memory.prefix_tiers import PeerPrefixes, PrefixTiers
from gpupoold.memory.slabs import BlockPlace
from tests.unit.memory.test_prefix_store import content_of, fill, long_keys, write

# Two layers: a block has 1 KiB and 3 KiB.
ROWS = (KvRow(0, 1024, 1024), KvRow(1 << 20, 3072, 3072))
BLOCK_BYTES = 4096
HOST_BYTES = 64 * BLOCK_BYTES
OWNER = owner_of("llama", "v1")


class Tiers:
    """A store, with what finds blocks elsewhere."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.host = KvHostCache(HOST_BYTES, 4 * BLOCK_BYTES, num_ranks=num_ranks)
        self.bytes = CacheBytes(self.host.fd, self.host.shape)
        self.fetcher = PrefixTiers(self.host)
        self.store = self.fetcher.store

    def fetch(self, *numbers: int, owner: str = OWNER) -> int:
        """Fetch blocks; return the bytes that have arrived."""
        keys = long_keys(*numbers)
        self.fetcher.refresh(owner)
        fetch = self.fetcher.begin(owner, keys, ROWS)
        assert fetch is not None
        assert fetch.keys == set(keys)
        num_bytes = fetch.finish()
        assert fetch.has_ended
        self.store.check_integrity()
        return num_bytes.total()

    def has(self, *numbers: int, owner: str = OWNER) -> bool:
        self.fetcher.refresh(owner)
        return all(self.fetcher.has(owner, key) for key in long_keys(*numbers))

    def close(self) -> None:
        self.fetcher.close()
        self.bytes.close()
        self.host.slabs.check_integrity()
        self.host.close()


@pytest.fixture
def near() -> Iterator[Tiers]:
    tiers = Tiers()
    yield tiers
    tiers.close()


@pytest.fixture
def far() -> Iterator[Tiers]:
    tiers = Tiers()
    yield tiers
    tiers.close()


class TestPeers:
    @pytest.fixture(autouse=True)
    def introduced(self, near: Tiers, far: Tiers) -> None:
        near.fetcher.add(1, PeerPrefixes(far.host.fd, near.host.shape))

    def test_blocks_are_copied(self, near: Tiers, far: Tiers) -> None:
        assert not near.has(1)
        content = fill(far.store, OWNER, *range(20))
        assert near.has(*range(20))
        assert not near.has(20)
        assert not near.has(1, owner=owner_of("llama", "v2"))
        assert near.fetch(*range(20)) == 20 * BLOCK_BYTES
        assert content_of(near.store, OWNER, *range(20)) == content

    def test_what_is_on_its_way_is_found_when_it_has_arrived(self, near: Tiers, far: Tiers) -> None:
        room = far.store.begin(OWNER, long_keys(1), ROWS)
        assert room is not None
        assert not near.has(1)
        room[1].note_arrival(has_arrived=True)
        assert near.has(1)
        room[1].free()

    def test_evicted_blocks_are_not_used(self, near: Tiers, far: Tiers) -> None:
        fill(far.store, OWNER, 1)
        assert near.has(1)
        assert far.store.evict_oldest()
        assert not near.has(1)
        assert near.fetch(1) == 0
        assert not near.store.has(OWNER, long_keys(1)[0])
        assert near.store.used_bytes == 0

    def test_a_block_that_is_replaced_during_its_copy(
        self, near: Tiers, far: Tiers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(far.store, OWNER, 1)
        copy = CacheBytes.copy

        def slow(
            to: CacheBytes, place: BlockPlace, source: CacheBytes, at: BlockPlace, size: int
        ) -> None:
            copy(to, place, source, at, size)
            assert far.store.evict_oldest()
            fill(far.store, OWNER, 2)

        monkeypatch.setattr(CacheBytes, "copy", slow)
        assert near.fetch(1) == 0
        assert not near.store.has(OWNER, long_keys(1)[0])

    def test_the_blocks_of_a_dead_worker_are_read_until_another_takes_over(
        self, near: Tiers, far: Tiers
    ) -> None:
        content = fill(far.store, OWNER, *range(3))
        heir = KvHostCache(HOST_BYTES, 4 * BLOCK_BYTES, former_fd=os.dup(far.host.fd))
        assert near.fetch(0) == BLOCK_BYTES
        store = PrefixStore(heir)
        near.fetcher.add(1, PeerPrefixes(heir.fd, near.host.shape))
        fill(store, OWNER, 7)
        assert near.has(0, 1, 2, 7)
        assert near.fetch(1, 2) == 2 * BLOCK_BYTES
        assert content_of(near.store, OWNER, 0, 1, 2) == content
        heir.close()

    def test_a_cache_of_other_sizes_is_refused(self, near: Tiers) -> None:
        other = KvHostCache(HOST_BYTES, 4 * BLOCK_BYTES, num_ranks=2)
        with pytest.raises(ValueError, match="has not the"):
            PeerPrefixes(other.fd, near.host.shape)
        other.close()

    def test_the_end_of_a_fetch_wakes(self, near: Tiers, far: Tiers) -> None:
        fill(far.store, OWNER, 1)
        near.fetch(1)
        assert os.eventfd_read(near.fetcher.wake_fd) == 1
        near.fetcher.clear()


def test_all_ranks_are_copied() -> None:
    near, far = Tiers(num_ranks=2), Tiers(num_ranks=2)
    near.fetcher.add(1, PeerPrefixes(far.host.fd, near.host.shape))
    room = far.store.begin(OWNER, long_keys(1), ROWS)
    assert room is not None
    [place] = room[1].places
    source = CacheBytes(far.host.fd, far.host.shape)
    for rank, view in enumerate(source.views(place, BLOCK_BYTES)):
        view[:] = bytes([rank + 1]) * BLOCK_BYTES
    room[1].note_arrival(has_arrived=True)
    room[1].free()
    assert near.fetch(1) == BLOCK_BYTES
    copies = near.store.take(OWNER, long_keys(1), ROWS)
    target = CacheBytes(near.host.fd, near.host.shape)
    got = [bytes(view) for view in target.views(copies.places[0], BLOCK_BYTES)]
    assert got == [bytes([rank + 1]) * BLOCK_BYTES for rank in range(2)]
    copies.free()
    for one in (source, target, near, far):
        one.close()


def test_places_outside_of_the_cache_are_refused(near: Tiers) -> None:
    mapped = CacheBytes(near.host.fd, near.host.shape)
    for place in (BlockPlace(16, 0), BlockPlace(15, 4), BlockPlace((1 << 32) - 1, 0)):
        with pytest.raises(ValueError, match="outside"):
            mapped.views(place, BLOCK_BYTES)
    mapped.close()


class Folder:
    """A folder of files, as one worker sees it."""

    def __init__(self, path: Path, tiers: Tiers, budget_bytes: int = 1 << 20) -> None:
        self.path = path
        self.tiers = tiers
        self.files = PrefixFiles(path, budget_bytes, tiers.host.shape.num_ranks)
        self.writer = PrefixWriter(tiers.store, tiers.bytes, self.files)
        tiers.fetcher.add("files", self.files)

    def write_all(self) -> None:
        num_under_way = -1
        while num_under_way:
            self.writer.poll()
            num_under_way = len(self.writer._under_way)
            time.sleep(0.002)

    def wait_for(self, *numbers: int, owner: str = OWNER) -> None:
        deadline_s = time.monotonic() + 10
        while not self.tiers.has(*numbers, owner=owner):
            assert time.monotonic() < deadline_s, "the files are not found"
            time.sleep(0.002)

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.path.rglob("*") if path.is_file()}


class TestFiles:
    @pytest.fixture
    def written(self, far: Tiers, tmp_path: Path) -> bytes:
        """Twenty blocks in three files; the writer is gone."""
        folder = Folder(tmp_path / "kv", far)
        content = fill(far.store, OWNER, *range(20))
        folder.write_all()
        assert folder.names == {key.hex() for key in long_keys(0, 8, 16)}
        folder.files.close()
        return content

    def test_blocks_come_back(self, near: Tiers, written: bytes, tmp_path: Path) -> None:
        folder = Folder(tmp_path / "kv", near)
        folder.wait_for(*range(20))
        assert near.fetch(*range(20)) == 20 * BLOCK_BYTES
        assert content_of(near.store, OWNER, *range(20)) == written
        modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "kv").rglob("*")}
        assert modes == {0o700, 0o600}
        # What came from files is written again by nobody.
        before = {path: path.stat().st_ino for path in (tmp_path / "kv").rglob("*")}
        folder.write_all()
        assert {path: path.stat().st_ino for path in (tmp_path / "kv").rglob("*")} == before
        folder.files.close()

    def test_another_owner_finds_nothing(self, near: Tiers, written: bytes, tmp_path: Path) -> None:
        folder = Folder(tmp_path / "kv", near)
        folder.wait_for(0)
        other = owner_of("llama", "v2")
        assert not near.has(0, owner=other)
        time.sleep(0.05)
        assert not near.has(0, owner=other)
        folder.files.close()

    def test_files_of_other_workers_are_found_later(self, near: Tiers, tmp_path: Path) -> None:
        reader = Folder(tmp_path / "kv", near)
        assert not near.has(1)
        for number in (1, 2):
            another = Tiers()
            folder = Folder(tmp_path / "kv", another)
            fill(another.store, OWNER, number)
            folder.write_all()
            folder.files.close()
            another.close()
            reader.wait_for(number)
        reader.files.close()

    @pytest.mark.parametrize("at", [0, 30, 100, 400, 610, 4096, 4096 + 8 * BLOCK_BYTES - 1])
    def test_damage_is_noticed(self, near: Tiers, written: bytes, tmp_path: Path, at: int) -> None:
        [path] = (tmp_path / "kv").rglob(long_keys(0)[0].hex())
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
        folder = Folder(tmp_path / "kv", near)
        folder.wait_for(8)
        assert near.fetch(*range(8)) == 0
        assert near.fetch(*range(8, 20)) == 12 * BLOCK_BYTES
        assert not near.has(0)
        assert not path.exists()
        folder.files.close()

    @pytest.mark.parametrize("num_bytes", [0, 100, 4095, 4096, 4096 + BLOCK_BYTES])
    def test_a_short_file_is_not_used(
        self, near: Tiers, written: bytes, tmp_path: Path, num_bytes: int
    ) -> None:
        [path] = (tmp_path / "kv").rglob(long_keys(0)[0].hex())
        os.truncate(path, num_bytes)
        folder = Folder(tmp_path / "kv", near)
        folder.wait_for(8)
        assert near.fetch(*range(8)) == 0
        folder.files.close()

    def test_a_deleted_file_is_not_used(self, near: Tiers, written: bytes, tmp_path: Path) -> None:
        folder = Folder(tmp_path / "kv", near)
        folder.wait_for(0)
        remove_files(tmp_path / "kv", owners_of("another"))
        assert len(folder.names) == 3
        remove_files(tmp_path / "kv", owners_of("llama"))
        assert not folder.names
        assert near.fetch(0) == 0
        folder.files.forget(owners_of("llama"))
        assert not near.has(0)
        folder.files.close()

    def test_a_damaged_file_is_written_again(
        self, near: Tiers, written: bytes, tmp_path: Path
    ) -> None:
        [path] = (tmp_path / "kv").rglob(long_keys(0)[0].hex())
        sound = path.read_bytes()
        path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        folder = Folder(tmp_path / "kv", near)
        folder.wait_for(0)
        assert near.fetch(*range(8)) == 0
        assert not path.exists()
        room = near.store.begin(OWNER, long_keys(*range(8)), ROWS)
        assert room is not None
        write(room[1], 8, seed=0)
        room[1].note_arrival(has_arrived=True)
        room[1].free()
        folder.write_all()
        assert path.exists()
        another = Tiers()
        reader = Folder(tmp_path / "kv", another)
        reader.wait_for(*range(8))
        assert another.fetch(*range(8)) == 8 * BLOCK_BYTES
        for one in (folder.files, reader.files, another):
            one.close()

    def test_what_is_forgotten_is_not_written_any_more(self, near: Tiers, tmp_path: Path) -> None:
        folder = Folder(tmp_path / "kv", near)
        assert not near.has(0)
        fill(near.store, OWNER, *range(8))
        fill(near.store, owner_of("qwen", "v1"), *range(8))
        near.store.forget(owners_of("llama"))
        folder.files.forget(owners_of("llama"))
        folder.write_all()
        [path] = [one for one in (tmp_path / "kv").rglob("*") if one.is_file()]
        assert path.parent.parent.name == owners_of("qwen")
        # A model of that name that is added again has files of its own.
        assert not near.has(0)
        fill(near.store, OWNER, *range(8))
        folder.write_all()
        folder.wait_for(*range(8))
        folder.files.close()

    def test_the_least_recently_used_go_first(self, near: Tiers, tmp_path: Path) -> None:
        file_bytes = 4096 + 8 * BLOCK_BYTES
        folder = Folder(tmp_path / "kv", near, budget_bytes=4 * file_bytes)
        for first in range(0, 24, 8):
            fill(near.store, OWNER, *range(first, first + 8))
            folder.write_all()
        paths = {path.name: path for path in (tmp_path / "kv").rglob("*") if path.is_file()}
        for age_s, first in enumerate((16, 0, 8)):  # from the newest use
            used_s = time.time() - 100 - age_s
            os.utime(paths[long_keys(first)[0].hex()], (used_s, used_s))
        for first in (24, 32):
            fill(near.store, OWNER, *range(first, first + 8))
            folder.write_all()
        assert folder.names == {key.hex() for key in long_keys(16, 24, 32)}
        folder.files.close()

    def test_a_use_counts(self, near: Tiers, written: bytes, tmp_path: Path) -> None:
        [path] = (tmp_path / "kv").rglob(long_keys(0)[0].hex())
        os.utime(path, (1, 1))
        folder = Folder(tmp_path / "kv", near)
        folder.wait_for(0)
        near.fetch(0)
        assert path.stat().st_mtime > 1
        folder.files.close()

    def test_a_full_disk_costs_nothing_but_the_files(
        self, near: Tiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = Folder(tmp_path / "kv", near)

        def full(source: Path, target: Path) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "rename", full)
        fill(near.store, OWNER, *range(8))
        folder.write_all()
        assert not folder.names
        assert near.store.evictable_bytes == near.store.used_bytes > 0
        folder.files.close()
