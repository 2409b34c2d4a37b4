"""The device benchmark's copies and mappings, on a small emulated device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.in_worker.copies import plain_copies
from benchmarks.in_worker.device import bench_device
from gpupoold.errors import Refused
from gpupoold.memory.bandwidth import scratch_memory
from gpupoold.memory.emulated import EmulatedDevice
from gpupoold.memory.pages import PagePool

PAGE = 64 << 10


class Loop(SimpleNamespace):
    """As much of a turn loop as an empty device needs."""

    def interrupt_turn(self) -> None:
        """Nobody has a turn."""


def loop_of(num_bytes: int, *, is_idle: bool = True) -> Any:
    device = EmulatedDevice(num_bytes, PAGE)
    return Loop(
        own=SimpleNamespace(device=device),
        ledger=SimpleNamespace(is_idle=lambda: is_idle),
        engines={},
        residency=SimpleNamespace(pool=PagePool(device.num_pages)),
    )


@pytest.fixture
def loop() -> Iterator[Any]:
    made = loop_of(48 << 20)
    yield made
    made.own.device.close()


def test_every_way_is_measured_and_everything_is_given_back(loop: Any) -> None:
    result = bench_device(loop, rounds=2)
    pool = loop.residency.pool
    assert pool.num_free == pool.num_pages == result["pages"]
    pool.check_integrity()
    rows = result["copies"]
    assert all(row["bytes_per_s"] > 0 for row in rows)
    best = {row["direction"]: 0.0 for row in rows}
    for row in rows:
        if row["by"] in ("device_copy", "memcpy_one_thread"):
            best[row["direction"]] = max(best[row["direction"]], row["ratio"])
    assert (best["in"], best["out"]) == (1.0, 1.0)
    copy_streams = [row for row in rows if row["by"] == "copy_stream" and row["direction"] == "out"]
    assert [row["batch_bytes"] for row in copy_streams if "batch_bytes" in row] == [
        size << 10 for size in (64, 256, 1024, 4096, 8192)
    ]
    assert [row["piece_bytes"] for row in copy_streams if "piece_bytes" in row] == [
        4 << 10,
        64 << 10,
    ]
    assert [row["direction"] for row in rows if row["by"] == "queue"] == ["in", "out", "both"]
    shapes = [(row["pages"], row["runs"]) for row in result["mapping"]]
    assert shapes == [(1, 1), (4, 1), (4, 4), (16, 1), (16, 16), (64, 1), (64, 64)]
    assert result["transfer_round_trip"]["samples"] == 2 * 50


def test_plain_copies_copy_all_of_it_both_ways(loop: Any) -> None:
    num_bytes = 3 * PAGE + 100
    with scratch_memory(loop.own.device, loop.residency.pool, num_bytes) as scratch:
        ways = plain_copies(loop.own.device, scratch)
        assert sorted(ways) == ["device_copy", "memcpy_one_thread"]
        for number, (copy_in, copy_out) in enumerate(ways.values(), start=1):
            data = bytes([number]) * num_bytes
            ctypes.memmove(scratch.host_address, data, num_bytes)
            assert copy_in() > 0
            assert ctypes.string_at(scratch.address, num_bytes) == data
            ctypes.memset(scratch.host_address, 0, num_bytes)
            assert copy_out() > 0
            assert ctypes.string_at(scratch.host_address, num_bytes) == data


def test_a_busy_or_tiny_device_is_refused() -> None:
    for loop, reason in (
        (loop_of(48 << 20, is_idle=False), "serving requests"),
        (loop_of(2 << 20), "too few free pages"),
    ):
        with pytest.raises(Refused, match=reason):
            bench_device(loop, rounds=1)
        loop.own.device.close()
