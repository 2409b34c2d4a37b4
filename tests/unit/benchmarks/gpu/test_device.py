"""The GPU's memory benchmarks on a driver without a GPU, which is strict about misuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.device import (
    copy_figures,
    layout_figures,
    mapping_figures,
    mapping_row,
    opened,
    report_copies,
)
from benchmarks.gpu.layouts import LAYOUTS, bench_layouts, geometry_of, used_blocks
from benchmarks.gpu.rig import Report, Setting
from benchmarks.gpu.shapes import SHAPES, TINY_SHAPES
from benchmarks.gpu.timed_driver import TimedDriver
from gpupoold.memory.cuda.driver import CudaError
from tests.unit.memory.fake_cuda import FakeCuda

PAGE = 64 << 10
GPU_PAGE = 8 << 20
SHAPE = TINY_SHAPES["8B"]


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting("device", False, False, tmp_path, Report(tmp_path / "out.json"), 0.0)


@pytest.fixture
def driver() -> FakeCuda:
    return FakeCuda(128 * PAGE)


def test_copies_are_measured_every_way(setting: Setting, driver: FakeCuda) -> None:
    with opened(setting, 16 * PAGE, PAGE, lambda: driver) as (device, _):
        report_copies(setting.report, device, 4 * PAGE)
    assert setting.report.figures.keys() == {
        *(f"{by}_{way}_bytes_per_s" for by in ("pinned", "queue") for way in ("in", "out")),
        "queue_both_ways_bytes_per_s",
    }
    assert not driver.leaks


def test_mapping_is_measured_by_page_and_by_call(setting: Setting, driver: FakeCuda) -> None:
    rows = []
    for page_bytes in (PAGE, 4 * PAGE):
        with opened(setting, 16 * PAGE, page_bytes, lambda: driver) as (device, timed):
            rows.append(mapping_row(device, timed, 8 * PAGE))
    found = mapping_figures(rows)
    for page in ("64KiB", "256KiB"):
        assert {
            *(f"{call}_call_of_{page}_pages_s" for call in ("map", "allow_access", "unmap")),
            *(f"{what}_gigabyte_in_{page}_pages_s" for what in ("map", "unmap")),
            f"create_{page}_page_s",
        } <= found.keys()
    assert all(figure["measured"] > 0 for figure in found.values())
    assert not driver.leaks


def test_kv_of_every_layout_goes_out_and_comes_back(setting: Setting, driver: FakeCuda) -> None:
    with opened(setting, 96 * PAGE, PAGE, lambda: driver) as (device, _):
        rows = bench_layouts(device, SHAPE, 64, rounds=1)
    assert len(layout_figures(rows)) == len(rows) == 2 * len(LAYOUTS)
    by_case = {(row["layout"], row["is_scattered"]): row for row in rows}
    assert {row["bytes"] for row in rows} == {32 * 16 * SHAPE.kv_bytes_per_token}
    assert by_case["blocks_outermost", False]["copies"] == 1
    assert by_case["layers_outermost", False]["copies"] == SHAPE.num_layers
    scattered = by_case["blocks_outermost", True]["copies"]
    assert by_case["layers_outermost", True]["copies"] == SHAPE.num_layers * scattered > 8
    assert not driver.leaks


def test_a_block_has_as_many_bytes_in_either_layout() -> None:
    shape = SHAPES["8B"]
    both = [geometry_of(shape, layout, 512, GPU_PAGE) for layout in LAYOUTS]
    assert [geometry.block_bytes for geometry in both] == [2 << 20, 2 << 20]
    assert [len(geometry.rows) for geometry in both] == [shape.num_layers, 1]
    assert all(geometry.is_aligned for geometry in both)


def test_the_null_block_is_nobodys() -> None:
    for is_scattered in (False, True):
        used = used_blocks(100, 50, is_scattered=is_scattered)
        assert len(set(used)) == 50
        assert used == sorted(used)
        assert 0 < used[0] <= used[-1] < 100


def test_copies_of_the_lanes_are_held_against_plain_ones() -> None:
    rates = {"pinned_in": 50.0, "pinned_out": 40.0, "queue_in": 44.0, "queue_out": 37.0}
    found = copy_figures(rates | {"queue_both": 80.0})
    assert [found[f"queue_{way}_bytes_per_s"]["reached"] for way in ("in", "out")] == [False, True]


class TestTimedDriver:
    def test_notes_what_each_call_takes_and_passes_on_what_it_says(self, driver: FakeCuda) -> None:
        ticks = iter(range(100))
        timed = TimedDriver(driver, clock=lambda: float(next(ticks)))
        timed.open(0)
        handles = [timed.create(PAGE) for _ in range(3)]
        for handle in handles:
            timed.release(handle)
        timed.close()
        assert len(set(handles)) == 3
        assert timed.taken_s("create") == [1.0] * 3
        assert timed.taken_s("create") == []
        timed.forget()
        assert timed.taken_s("release") == []

    def test_a_failed_call_counts_and_fails(self, driver: FakeCuda) -> None:
        timed = TimedDriver(driver)
        driver.fail_at["create"] = 1
        timed.open(0)
        with pytest.raises(CudaError):
            timed.create(PAGE)
        assert len(timed.taken_s("create")) == 1
        timed.close()
