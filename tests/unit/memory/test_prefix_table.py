"""The index of copies in shared memory: what a reader and the next writer find."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gpupoold.memory.host import KEY_BYTES, MAX_BLOCKS, OWNER_BYTES, CacheShape, PrefixTable
from gpupoold.memory.slabs import BlockPlace

SHAPE = CacheShape(budget_bytes=3 << 20, slab_bytes=4096, num_ranks=2)
OWNER = b"o" * OWNER_BYTES


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("table")
    os.ftruncate(fd, SHAPE.file_bytes)
    PrefixTable(fd, SHAPE, is_new=True).close()
    yield fd
    os.close(fd)


def keys(*numbers: int) -> list[bytes]:
    return [b"%036d" % number for number in numbers]


def places(*numbers: int) -> list[BlockPlace]:
    return [BlockPlace(number, number + 1) for number in numbers]


def writer(fd: int) -> PrefixTable:
    table = PrefixTable(fd, SHAPE)
    table.open_for_writing()
    return table


def add(table: PrefixTable, *numbers: int, arrives: bool = True) -> int:
    number = table.add(OWNER, 512, keys(*numbers), places(*numbers))
    assert number is not None
    if arrives:
        table.note_arrival(number)
    return number


def test_a_reader_finds_what_has_arrived(fd: int) -> None:
    table, reader = writer(fd), PrefixTable(fd, SHAPE)
    number = add(table, 1, 2, 3, arrives=False)
    assert reader.read(number) is None
    table.note_arrival(number)
    record = reader.read(number)
    assert record is not None
    assert record.owner == OWNER
    assert record.block_bytes == 512
    assert record.keys == tuple(keys(1, 2, 3))
    assert record.places == tuple(places(1, 2, 3))
    assert reader.is_current(number, record.version)


def test_a_removed_record_is_not_current_even_if_another_takes_its_number(fd: int) -> None:
    table, reader = writer(fd), PrefixTable(fd, SHAPE)
    number = add(table, 1)
    record = reader.read(number)
    assert record is not None
    table.remove(number)
    assert not reader.is_current(number, record.version)
    assert reader.read(number) is None
    assert add(table, 1) == number
    assert not reader.is_current(number, record.version)


def test_a_reader_follows_the_additions(fd: int) -> None:
    table, reader = writer(fd), PrefixTable(fd, SHAPE)
    first = add(table, 1)
    assert reader.added_since(0) == ([first], 1)
    assert reader.added_since(1) == ([], 1)
    for _ in range(9000):  # more than the ring has places
        table.remove(add(table, 2))
    second = add(table, 2)
    found, total = reader.added_since(1)
    assert set(found) == {first, second}
    assert total == 9002
    assert reader.added_since(total - 1)[0] == [second]


def test_the_next_writer_goes_on(fd: int) -> None:
    table = writer(fd)
    old, used, unfinished = add(table, 1), add(table, 2), add(table, 3, arrives=False)
    newer = add(table, *range(10, 10 + MAX_BLOCKS))
    table.note_use(used)
    table.close()
    reader = PrefixTable(fd, SHAPE)
    versions = {one: record.version for one in (old, used) if (record := reader.read(one))}
    table = PrefixTable(fd, SHAPE)
    records = table.open_for_writing()
    assert [record.number for record in records] == [old, newer, used]
    assert table.numbers == {old, used, newer}
    again = add(table, 4)
    assert again == unfinished
    record = reader.read(again)
    assert record is not None
    assert record.version > max(versions.values())
    assert all(reader.is_current(one, version) for one, version in versions.items())


def test_a_full_table_takes_no_more(fd: int) -> None:
    table = writer(fd)
    numbers = {add(table, one) for one in range(SHAPE.num_records)}
    assert len(numbers) == SHAPE.num_records
    assert table.add(OWNER, 512, keys(0), places(0)) is None
    table.remove(numbers.pop())
    assert table.add(OWNER, 512, keys(0), places(0)) is not None


@pytest.mark.parametrize(
    "shape",
    [
        CacheShape(2 << 20, 4096, 3),  # the table is at the same place
        CacheShape(6 << 20, 4096, 1),
    ],
)
def test_a_table_of_another_cache_is_refused(fd: int, shape: CacheShape) -> None:
    writer(fd).close()
    os.ftruncate(fd, shape.file_bytes)
    with pytest.raises(ValueError, match="other sizes"):
        PrefixTable(fd, shape)


def test_a_file_of_another_size_is_refused(fd: int) -> None:
    os.ftruncate(fd, SHAPE.file_bytes + 4096)
    with pytest.raises(ValueError, match="has not the"):
        PrefixTable(fd, SHAPE)


def test_a_table_of_other_slabs_is_refused(fd: int) -> None:
    with pytest.raises(ValueError, match="other sizes"):
        PrefixTable(fd, CacheShape(3 << 20, 8192, 2))


def test_numbers_beyond_the_table_are_no_records(fd: int) -> None:
    assert PrefixTable(fd, SHAPE).read(SHAPE.num_records) is None


def test_sizes_are_those_of_vllms_keys() -> None:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    assert len(make_block_hash_with_group_id(b"h" * 32, 1)) == KEY_BYTES  # type: ignore[arg-type]
