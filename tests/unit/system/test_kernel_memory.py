"""The memory limit of a control group, of both versions, in synthetic trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpupoold.system.kernel_memory import memory_limit_bytes, memory_room_bytes

NO_LIMIT = "9223372036854771712"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def belongs_to(root: Path, *lines: str) -> None:
    (root / "proc/self/cgroup").write_text("".join(f"{one}\n" for one in lines))


def limit(root: Path, file: str, value: str) -> None:
    path = root / "sys/fs/cgroup" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def test_version_2_the_lowest_of_the_group_and_its_ancestors(root: Path) -> None:
    belongs_to(root, "0::/system.slice/gpupoold.service")
    limit(root, "system.slice/gpupoold.service/memory.max", "max")
    assert memory_limit_bytes(root=root) is None
    limit(root, "system.slice/memory.max", "4096")
    limit(root, "system.slice/gpupoold.service/memory.max", "8192")
    assert memory_limit_bytes(root=root) == 4096


def test_version_1(root: Path) -> None:
    belongs_to(root, "5:cpu,cpuacct:/a", "4:memory:/pods/one", "0::/")
    limit(root, "memory/memory.limit_in_bytes", NO_LIMIT)
    limit(root, "memory/pods/one/memory.limit_in_bytes", NO_LIMIT)
    limit(root, "cpu/a/memory.limit_in_bytes", "1")
    assert memory_limit_bytes(root=root) is None
    limit(root, "memory/pods/memory.limit_in_bytes", "8192")
    assert memory_limit_bytes(root=root) == 8192


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/", "memory.max"),
        ("0::/../../elsewhere", "memory.max"),
        ("4:memory:/docker/17ab", "memory/memory.limit_in_bytes"),
    ],
)
def test_in_a_container_the_root_of_the_tree_counts(root: Path, line: str, file: str) -> None:
    belongs_to(root, line)
    limit(root, file, "4096")
    assert memory_limit_bytes(root=root) == 4096


@pytest.mark.parametrize("line", ["", "nonsense", "0::", "4:memory"])
def test_without_a_group_there_is_no_limit(root: Path, line: str) -> None:
    belongs_to(root, line)
    assert memory_limit_bytes(root=root) is None


def test_another_process(root: Path) -> None:
    belongs_to(root, "0::/mine")
    (root / "proc/17").mkdir()
    (root / "proc/17/cgroup").write_text("0::/daemon\n")
    limit(root, "daemon/memory.max", "4096")
    assert memory_limit_bytes(17, root) == 4096
    assert memory_limit_bytes(18, root) is None


def test_room_in_version_2(root: Path) -> None:
    """Cached files leave before the limit is reached, and shared memory does not."""
    belongs_to(root, "0::/system.slice/gpupoold.service")
    group = "system.slice/gpupoold.service"
    limit(root, f"{group}/memory.current", "6000")
    limit(root, f"{group}/memory.stat", "anon 1000\nfile 5000\nshmem 2000\ninactive_file 2500\n"
          "active_file 500")  # fmt: skip
    assert memory_room_bytes(root) is None
    limit(root, f"{group}/memory.max", "8192")
    assert memory_room_bytes(root) == 8192 - 3000
    limit(root, "system.slice/memory.max", "9000")
    limit(root, "system.slice/memory.current", "8900")
    assert memory_room_bytes(root) == 100
    limit(root, "system.slice/memory.current", "9100")
    assert memory_room_bytes(root) == 0


def test_room_in_version_1(root: Path) -> None:
    belongs_to(root, "4:memory:/docker/17ab")
    limit(root, "memory/memory.limit_in_bytes", "8192")
    limit(root, "memory/memory.usage_in_bytes", "6000")
    limit(root, "memory/memory.stat", "inactive_file 1\ntotal_inactive_file 3000\n")
    assert memory_room_bytes(root) == 8192 - 3000
    limit(root, "memory/memory.usage_in_bytes", "unreadable")
    assert memory_room_bytes(root) == 8192
