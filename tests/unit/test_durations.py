"""Files run longest first, and the shards of the slow tests are of about equal duration."""

from __future__ import annotations

from tests.support.durations import (
    RECORD,
    ROOT,
    longer_files,
    longest_first,
    merged,
    parts_of,
    read_record,
    shard_of,
)

THIS = "tests/unit/test_durations.py"
DURATIONS = {"a": 60.0, "b": 30.0, "c": 29.0, "d": 20.0, "e": 10.0}


def test_the_longest_file_is_first() -> None:
    assert longest_first(["e", "new", "d", "a"], DURATIONS) == ["a", "d", "e", "new"]


def test_each_file_is_in_one_shard() -> None:
    shards = [shard_of(DURATIONS, DURATIONS, number, 3) for number in (1, 2, 3)]
    assert sorted(file for shard in shards for file in shard) == sorted(DURATIONS)


def test_shards_have_equal_durations() -> None:
    shards = [shard_of(DURATIONS, DURATIONS, number, 3) for number in (1, 2, 3)]
    assert shards == [{"a"}, {"b", "e"}, {"c", "d"}]


def test_the_order_of_collection_does_not_change_a_shard() -> None:
    assert shard_of("abcde", DURATIONS, 2, 3) == shard_of("edcba", DURATIONS, 2, 3)


def test_a_record_keeps_files_that_did_not_run_and_loses_those_that_are_gone() -> None:
    other = "tests/conftest.py"
    before = {"test": {other: 3.0, "tests/gone.py": 5.0, THIS: 2.0}, "slow": {}}
    after = merged(before, {"test": {THIS: 4.04}})
    assert after == {"test": {other: 3.0, THIS: 4.0}, "slow": {}}


def test_the_record_names_files_of_the_project() -> None:
    files = {file for durations in read_record(RECORD).values() for file in durations}
    assert {file for file in files if not file.startswith("tests/")} == set()
    assert ROOT.joinpath(THIS).is_file()


def test_files_longer_than_a_shard() -> None:
    assert longer_files(DURATIONS, 3) == {"a"}
    assert longer_files(DURATIONS, 6) == {"a", "b", "c"}


def test_a_file_longer_than_a_shard_is_dealt_out_by_test() -> None:
    tests = [*(f"long.py::test[{number}]" for number in range(4)), "a.py::test", "a.py::other"]
    parts_s = parts_of(tests, {"long.py": 100.0, "a.py": 20.0}, 2)
    assert parts_s == {**dict.fromkeys(tests[:4], 25.0), "a.py": 20.0}
    shards = [shard_of(parts_s, parts_s, number, 2) for number in (1, 2)]
    assert [sum(parts_s[part] for part in shard) for shard in shards] == [70.0, 50.0]
    assert shards[0] | shards[1] == parts_s.keys()
    assert parts_of(tests, {"long.py": 100.0, "a.py": 100.0}, 2).keys() == {"long.py", "a.py"}
