"""The model cache: what counts as used, and who closes descriptors."""

from __future__ import annotations

import os

import pytest

from gpupoold.control.weights import cache as cache_module
from gpupoold.control.weights.cache import CachedSnapshot, SnapshotCache, SnapshotId

A, B, C = SnapshotId("a"), SnapshotId("b"), SnapshotId("c")


def snapshot(num_bytes: int) -> int:
    fd = os.memfd_create("snapshot")
    os.ftruncate(fd, num_bytes)
    return fd


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_snapshots_come_and_go() -> None:
    cache = SnapshotCache(10_000)
    first, second = snapshot(3000), snapshot(4000)
    cache.put(A, first, "d1")
    cache.put(B, second, "d2")
    assert cache.get(A) == CachedSnapshot(first, 3000, "d1")
    assert cache.get(C) is None
    assert cache.used_bytes == 7000
    cache.drop(A)
    cache.drop(A)
    assert not is_open(first)
    assert cache.used_bytes == 4000
    assert list(cache.snapshots) == [B]
    cache.close()
    assert not is_open(second)
    assert cache.used_bytes == 0


@pytest.mark.parametrize(
    ("parts", "gpus", "is_far"),
    [
        ((0,), (0,), False),
        ((1,), (0,), True),
        ((0, 1), (0, 1), False),
        ((0, 0), (0, 1), True),
        ((-1,), (0,), False),
        ((1,), (-1,), False),
    ],
)
def test_a_snapshot_is_far_from_a_gpu_on_another_node(
    parts: tuple[int, ...], gpus: tuple[int, ...], is_far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "nodes_of", lambda fd, num_bytes, degree: parts[:degree])
    snapshots = SnapshotCache(10_000)
    kept = snapshots.put(SnapshotId("a", len(gpus)), snapshot(4096), "d")
    assert kept.is_far_from(gpus) is is_far
    snapshots.close()


def test_a_new_snapshot_replaces_the_old_one() -> None:
    cache = SnapshotCache(10_000)
    old, new = snapshot(3000), snapshot(5000)
    cache.put(A, old, "d1")
    cache.put(A, new, "d2")
    assert not is_open(old)
    assert cache.get(A) == CachedSnapshot(new, 5000, "d2")
    cache.close()


def test_room_that_is_kept_is_used() -> None:
    cache = SnapshotCache(10_000)
    assert (cache.short_bytes(A, 10_000), cache.short_bytes(A, 10_001)) == (0, 1)
    cache.reserve(A, 6000)
    assert cache.used_bytes == 6000
    assert cache.short_bytes(A, 10_000) == 0  # its own
    assert cache.short_bytes(B, 5000) == 1000
    cache.put(A, snapshot(5500), "d")
    assert cache.used_bytes == 5500
    cache.reserve(A, 7000)  # to be replaced by a larger one
    assert cache.used_bytes == 7000
    assert cache.short_bytes(B, 5000) == 2000
    cache.release(A)
    cache.release(A)
    assert cache.used_bytes == 5500
    cache.close()


def test_an_snapshot_on_its_way_out_is_used_but_nobodys() -> None:
    cache = SnapshotCache(10_000)
    old, new = snapshot(3000), snapshot(4000)
    cache.put(A, old, "d")
    cache.retire(A)
    assert cache.get(A) is None
    assert cache.snapshots == {}
    assert cache.used_bytes == 3000
    assert is_open(old)
    cache.put(A, new, "d")
    assert cache.used_bytes == 7000
    cache.drop_retired(A)
    cache.drop_retired(A)
    assert not is_open(old)
    assert cache.used_bytes == 4000
    cache.retire(A)
    cache.close()
    assert not is_open(new)


def test_when_models_were_used() -> None:
    now_s = 100.0
    cache = SnapshotCache(0, now=lambda: now_s)
    assert cache.last_used_at("a") is None
    cache.touch("a")
    cache.touch("b", at=50.0)
    now_s = 200.0
    assert (cache.last_used_at("a"), cache.last_used_at("b")) == (100.0, 50.0)
    cache.touch("b")
    assert cache.last_used_at("b") == 200.0


def test_the_order_of_uses_survives_a_clock_that_is_set_back() -> None:
    now_s = 100_000.0
    cache = SnapshotCache(0, now=lambda: now_s)
    for model, step_s in (("a", 0.0), ("b", -86_400.0), ("c", 1.0), ("a", 1.0)):
        now_s += step_s
        cache.touch(model)
    uses = {model: cache.last_used_at(model) or 0.0 for model in "abc"}
    assert sorted(uses, key=uses.__getitem__) == ["b", "c", "a"]


def test_a_model_that_is_gone_leaves_nothing() -> None:
    cache = SnapshotCache(10_000)
    fd = snapshot(3000)
    cache.put(A, fd, "d")
    cache.reserve(A, 4000)
    cache.touch("a")
    cache.pinned.add("a")
    cache.forget("a")
    cache.forget("a")
    assert not is_open(fd)
    assert (cache.used_bytes, cache.pinned, cache.last_used_at("a")) == (0, set(), None)


def test_an_snapshot_that_is_there_already_stays() -> None:
    cache = SnapshotCache(10_000)
    fd = snapshot(3000)
    first = cache.put(A, fd, "d1", (1,))
    again = os.dup(fd)
    assert cache.put(A, again, "d1", (1,)) is first
    assert not is_open(again)
    other = os.dup(fd)
    assert cache.put(A, other, "d1", (2,)) == CachedSnapshot(other, 3000, "d1", (2,))
    assert not is_open(fd)
    cache.close()


def test_each_degree_counts_and_goes_alone() -> None:
    cache = SnapshotCache(10_000, now=lambda: 5.0)
    group = SnapshotId("a", 2)
    cache.touch("a", at=1.0)
    cache.put(A, snapshot(3000), "d1")
    cache.put(group, snapshot(4000), "d2")
    assert (cache.used_bytes, cache.num_bytes("a")) == (7000, 7000)
    assert [one.degree for one in cache.of_model("a")] == [1, 2]
    assert (cache.short_bytes(group, 7000), cache.short_bytes(group, 7001)) == (0, 1)
    cache.touch("a", degree=2)
    assert (cache.last_use_of(A), cache.last_use_of(group)) == (1.0, 5.0)
    cache.drop(A)
    assert list(cache.snapshots) == [group]
    assert cache.known_bytes(A) == 3000
    cache.put(A, snapshot(3000), "d1")
    cache.forget("a")
    assert (cache.used_bytes, cache.known_bytes(A)) == (0, None)
