"""Whatever system call of a change fails: it is done or as before, and can be done later.

Nothing is left open or lying about. The tables are in ``tests/syscall_faults``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.syscall_faults.injector import build_shim, run_tables
from tests.syscall_faults.scenarios import SCENARIOS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def results(shim: Path) -> Results:
    """Each call fails with one of its errors."""
    return run_tables(shim, is_whole=False, timeout_s=280)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_call_fails_once(results: Results, name: str) -> None:
    result = results[name]
    assert result["problems"] == []
    assert result["faults"] >= 1
    assert result["unmet"] <= result["faults"] // 10, "the calls are others in each run"


def test_calls_of_every_kind_failed(results: Results) -> None:
    """The shim would say nothing if the interpreter called the kernel in another way."""
    kinds = {kind for result in results.values() for kind in result["counts"]}
    assert kinds >= {
        *("write", "fsync", "rename", "memfd_create", "fork", "truncate", "mmap"),
        *("socketpair", "open", "dup", "mkdir", "socket"),
    }


@pytest.mark.timeout(1800)
def test_every_call_fails_with_every_error(shim: Path) -> None:
    results = run_tables(shim, is_whole=True, timeout_s=1700)
    assert {name: one["problems"] for name, one in results.items() if one["problems"]} == {}
