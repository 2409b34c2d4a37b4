"""The units: device files of NVIDIA's driver, with stand-ins for its program; caches."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

GPUS = "/proc/driver/nvidia/gpus"
SHMEM = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def unit(name: str) -> configparser.RawConfigParser:
    """The settings of a unit; of a repeated setting the last."""
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    text = (ROOT / "systemd" / name).read_text().replace("\\\n", " ")
    parser.read_string(text)
    return parser


def command(gpus: Path) -> list[str]:
    """The unit's command, as systemd runs it, for GPUs in another folder."""
    line = unit("gpupoold-nvidia.service")["Service"]["ExecStart"]
    return shlex.split(line.replace("$$", "$").replace(GPUS, str(gpus)))


def calls(tmp_path: Path, *minors: int, program: str = "true") -> tuple[int, list[str]]:
    """Run the command on a machine with GPUs; return its status and the calls of the program."""
    tools, log = tmp_path / "tools", tmp_path / "calls"
    tools.mkdir()
    (tools / "sed").symlink_to(shutil.which("sed") or "")
    for number, minor in enumerate(minors):
        gpu = tmp_path / "gpus" / f"0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t NVIDIA A10\nDevice Minor: \t {minor}\n")
    if program:
        (tools / "nvidia-modprobe").write_text(f'#!/bin/sh\necho "$@" >>{log}\n{program}\n')
        (tools / "nvidia-modprobe").chmod(0o755)
    environment = {"PATH": str(tools)}
    done = subprocess.run(command(tmp_path / "gpus"), env=environment, check=False, timeout=20)
    return done.returncode, log.read_text().splitlines() if log.exists() else []


def test_every_gpu_gets_its_file(tmp_path: Path) -> None:
    assert calls(tmp_path, 0, 3) == (0, ["-c=255", "-u -c=0 -c=1", "-c=0", "-c=3"])


@pytest.mark.parametrize(("program", "status"), [("", 0), ("exit 1", 1)])
def test_a_machine_without_a_driver(tmp_path: Path, program: str, status: int) -> None:
    """No program is no fault; a program that fails is one, which `systemctl --failed` shows."""
    assert calls(tmp_path, program=program)[0] == status


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("always within_size advise [never] deny force", "advise"),
        ("always [within_size] advise never deny force", None),
        ("always within_size advise never [deny] force", None),
    ],
)
def test_memory_files_may_have_huge_pages_unless_the_administrator_chose(
    tmp_path: Path, before: str, after: str | None
) -> None:
    mode = tmp_path / "shmem_enabled"
    mode.write_text(f"{before}\n")
    text = (ROOT / "systemd" / "gpupoold-nvidia.service").read_text().replace("\\\n", " ")
    [line] = [line for line in text.splitlines() if line.startswith("ExecStart=-")]
    command = line.removeprefix("ExecStart=-").replace("$$", "$").replace(SHMEM, str(mode))
    subprocess.run(shlex.split(command), check=True, timeout=20)
    assert mode.read_text() == f"{after or before}\n"


def test_a_kernel_without_huge_pages_is_no_fault() -> None:
    """The dash before the command: systemd ignores its failure."""
    text = (ROOT / "systemd" / "gpupoold-nvidia.service").read_text()
    assert text.count(SHMEM) == 1
    assert f"ExecStart=-/bin/sh -ec 'mode={SHMEM};" in text


def test_the_daemon_starts_after_it_and_without_it() -> None:
    daemon, files = unit("gpupoold.service"), unit("gpupoold-nvidia.service")
    text = (ROOT / "systemd" / "gpupoold.service").read_text()
    assert "\nWants=gpupoold-nvidia.service\n" in text
    assert "\nAfter=gpupoold-nvidia.service nvidia-persistenced.service" in text
    assert "nvidia-fabricmanager.service\n" in text
    assert files["Service"]["Type"] == "oneshot"
    # A command of a unit with DevicePolicy= cannot create device files, not even as root.
    assert daemon["Service"]["DevicePolicy"] == "closed"
    assert "nvidia-modprobe" not in text
    assert not [key for key in files["Service"] if "Device" in key or key == "User"]


def test_compiled_kernels_are_in_the_cache_folder() -> None:
    """By default in the home folder, which is the state folder, and in /tmp, which is private."""
    lines = (ROOT / "systemd" / "gpupoold.service").read_text().splitlines()
    texts = [line.partition("=")[2].split() for line in lines if line.startswith("Environment=")]
    variables = dict(text.split("=", 1) for words in texts for text in words)
    for name in (
        "XDG_CACHE_HOME",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "CUDA_CACHE_PATH",
        "FLASHINFER_WORKSPACE_BASE",
    ):
        assert variables[name].startswith("%C/gpupool"), name
