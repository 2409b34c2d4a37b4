"""Checks of ``make venv`` before anything is downloaded, with stand-ins for programs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpupoold.doctor.checks import LEAST_DRIVERS
from tests.conftest import ROOT

# As much of nvidia-smi's table as is read.
SMI = "| NVIDIA-SMI 570.1     Driver Version: {driver}     CUDA Version: {cuda} |\n"
UMD = "| NVIDIA-SMI 590.1     Driver Version: {driver}     CUDA UMD Version: {cuda} |\n"
# The disks of / and /tmp, with MB that are free.
DISKS = """echo Heading
case "$*" in
    *target*/tmp) echo /tmp ;;
    *target*) echo / ;;
    */tmp) echo {tmp} ;;
    *) echo {root} ;;
esac"""
TOOLS = ("bash", "basename", "cat", "cut", "dirname", "flock", "grep", "head", "mkdir", "rm", "sed",
         "sha256sum", "tail")  # fmt: skip
MakeVenv = Callable[..., subprocess.CompletedProcess[str]]


def write_tool(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with everything on the PATH: all is well, but no environment can be made."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    for name in ("gcc", "g++"):
        write_tool(folder, name, "exit 0")
    write_tool(folder, "df", DISKS.format(root=500_000, tmp=500_000))
    smi = SMI.format(driver="580.65.06", cuda="13.0")
    write_tool(folder, "nvidia-smi", f"[ $# = 1 ] && echo 'GPU 0: X' || cat <<'_'\n{smi}_")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    # Where the headers are is the only fact that a test changes.
    headers = f"import sysconfig; sysconfig.get_path = lambda name: {str(tmp_path / 'include')!r}"
    write_tool(
        folder,
        "python3.11",
        f'[ "$1" = -m ] && exit 1\n[ "$1" = -c ] && exec {sys.executable} -c "{headers}\n$2"\n'
        f'exec {sys.executable} "$@"',
    )
    return folder


@pytest.fixture
def make_venv(tmp_path: Path, tools: Path) -> MakeVenv:
    for name in ("scripts/make_venv.sh", "requirements/cpu.txt", "requirements/cuda.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tmp_path / "scripts/make_venv.sh"],
            env={"PATH": str(tools), **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


@pytest.mark.parametrize("table", [SMI, UMD])
def test_a_driver_that_is_new_enough(make_venv: MakeVenv, tools: Path, table: str) -> None:
    smi = table.format(driver="580.65.06", cuda="13.0")
    write_tool(tools, "nvidia-smi", f"[ $# = 1 ] && echo 'GPU 0: X' || cat <<'_'\n{smi}_")
    done = make_venv()
    assert "-m venv failed" in done.stderr, "all checks have passed"
    assert "cuda.txt" in done.stdout
    assert "downloads about 4 GB" in done.stdout


@pytest.mark.parametrize("table", [SMI, UMD])
def test_a_driver_that_is_too_old(make_venv: MakeVenv, tools: Path, table: str) -> None:
    smi = table.format(driver="570.195.03", cuda="12.8")
    write_tool(tools, "nvidia-smi", f"[ $# = 1 ] && echo 'GPU 0: X' || cat <<'_'\n{smi}_")
    done = make_venv()
    assert done.returncode == 1
    assert "driver 570.195.03 is for CUDA up to 12.8" in done.stderr
    assert f"install driver {LEAST_DRIVERS[13]} or newer" in done.stderr
    assert "-m venv failed" in make_venv(GPUPOOL_DEVICE="cpu").stderr


def test_no_driver_here(make_venv: MakeVenv, tools: Path) -> None:
    (tools / "nvidia-smi").unlink()
    done = make_venv(GPUPOOL_DEVICE="cuda")
    assert "-m venv failed" in done.stderr
    assert "cuda.txt" in done.stdout


def test_what_kernels_are_compiled_with(make_venv: MakeVenv, tools: Path, tmp_path: Path) -> None:
    (tools / "g++").unlink()
    (tmp_path / "include" / "Python.h").unlink()
    done = make_venv()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert done.returncode == 1
    assert f"g++, Python.h of Python {version}" in done.stderr
    assert f"apt install gcc g++ libc6-dev python{version}-dev" in done.stderr
    (tools / "gcc").unlink()
    assert "a C compiler, g++, Python.h" in make_venv().stderr
    assert "a C compiler" not in make_venv(CC="cat").stderr


@pytest.mark.parametrize(
    ("root", "tmp", "tmp_dir", "refusal"),
    [
        (9_999, 500_000, "/tmp", "the disk of / has 9 GB free, 10 GB are needed"),
        (500_000, 3_000, "/tmp", "the disk of /tmp has 3 GB free, 4 GB are needed"),
        (13_000, 0, "/", "the disk of / has 13 GB free, 14 GB are needed"),
    ],
)
def test_disks_that_are_too_small(
    make_venv: MakeVenv,
    tools: Path,
    tmp_path: Path,
    root: int,
    tmp: int,
    tmp_dir: str,
    refusal: str,
) -> None:
    write_tool(tools, "df", DISKS.format(root=root, tmp=tmp))
    done = make_venv(TMPDIR=tmp_dir)
    assert done.returncode == 1
    assert refusal in done.stderr
    assert not (tmp_path / ".venv").exists()
    write_tool(tools, "df", DISKS.format(root=root + 1_000, tmp=tmp + 1_000))
    assert "-m venv failed" in make_venv(TMPDIR=tmp_dir).stderr
