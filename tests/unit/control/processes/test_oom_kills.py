"""The kernel's count of processes that it has killed for memory."""

from __future__ import annotations

from pathlib import Path

from gpupoold.control.processes import supervised
from gpupoold.control.processes.supervised import OomKills


def write(path: Path, count: int) -> None:
    path.write_text(f"nr_free_pages 100\noom_kill {count}\nunevictable_pgs_culled 3\n")


def test_one_is_new_for_a_moment(tmp_path: Path) -> None:
    path = tmp_path / "vmstat"
    write(path, 4)
    kills = OomKills(0.0, path)
    assert not kills.is_new()
    write(path, 5)
    assert kills.is_new()
    for later_s in range(1, 10):
        kills.check(float(later_s))
    assert not kills.is_new()


def test_a_kernel_that_does_not_say(tmp_path: Path) -> None:
    kills = OomKills(0.0, tmp_path / "nowhere")
    assert not kills.is_new()
    (tmp_path / "vmstat").write_text("nr_free_pages 100\n")
    assert not OomKills(0.0, tmp_path / "vmstat").is_new()


def test_this_kernel_says() -> None:
    assert "oom_kill " in supervised.VMSTAT.read_text()
