"""``make install`` into a staging folder: what is there, what stays, what systemd says of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import ROOT

LIB = "usr/local/lib"
UNITS = f"{LIB}/systemd/system"
MAX_EXPOSURE = 3.0

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (package systemd)"
)


def files_under(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }


class Stage:
    """A staging folder, and an environment to install: an empty one that sees this one's."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self._venv = folder / "venv"
        command = [sys.executable, "-m", "venv", "--without-pip", str(self._venv)]
        subprocess.run(command, check=True)
        [packages] = self._venv.glob("lib/python3*/site-packages")
        (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def make(self, target: str, **variables: str) -> subprocess.CompletedProcess[str]:
        given = {"DESTDIR": str(self.root), "VENV": str(self._venv)} | variables
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            ["make", "-C", str(ROOT), target, *(f"{name}={given[name]}" for name in given)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """Something was there before; then gpupool was installed."""
    made = Stage(tmp_path_factory.mktemp("stage"))
    for name in ("usr/local/bin/other", "etc/other.conf", f"{UNITS}/other.service"):
        path = made.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    done = made.make("install")
    assert done.returncode == 0, done.stderr
    return made


def test_everything_is_in_its_place(stage: Stage) -> None:
    for name in ("gpupoold.service", "gpupoold.socket", "gpupoold-admin.socket"):
        assert (stage.root / UNITS / name).is_file()
    assert (
        "ExecStart=/usr/local/bin/gpupoold\n"
        in (stage.root / UNITS / "gpupoold.service").read_text()
    )
    assert os.readlink(stage.root / "usr/local/bin/gpupool") == "../lib/gpupool/bin/gpupool"
    for path in (
        f"{LIB}/sysusers.d/gpupool.conf",
        f"{LIB}/tmpfiles.d/gpupool.conf",
        "usr/local/share/doc/gpupool/service.md",
    ):
        assert (stage.root / path).is_file()
    example = (ROOT / "examples/gpupool.toml").read_text()
    assert (stage.root / "etc/gpupool/gpupool.toml").read_text() == example
    completion = stage.root / "usr/local/share/bash-completion/completions/gpupool"
    assert "complete" in completion.read_text()


def test_programs_name_the_final_place_and_run(stage: Stage) -> None:
    folder = stage.root / LIB / "gpupool/bin"
    for name in ("gpupool", "gpupoold"):
        assert str(stage.root) not in (folder / name).read_text()
        assert "/usr/local/lib/gpupool/bin/python" in (folder / name).read_text()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = "import gpupoold, gpupool_cli, gpupool_state; print(gpupoold.__file__)"
    done = subprocess.run(
        [folder / "python", "-c", where],
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(stage.root / LIB / "gpupool/lib"))
    done = subprocess.run(
        [folder / "python", folder / "gpupoold", "--version"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "0.1.0"


@needs_analyze
def test_systemd_finds_nothing_wrong_with_the_units(stage: Stage) -> None:
    units = [str(path) for path in (stage.root / UNITS).glob("gpupoold*")]
    here = [text_with_paths_of(stage, Path(unit)) for unit in units]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, here)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "gpupool" in line]
    assert (done.returncode, ours) == (0, [])


def text_with_paths_of(stage: Stage, unit: Path) -> Path:
    """The unit with the program where it is now, as its existence is checked."""
    folder = stage.root / "verify"
    folder.mkdir(exist_ok=True)
    copy = folder / unit.name
    text = unit.read_text()
    copy.write_text(text.replace("=/usr/local/bin/", f"={stage.root}/usr/local/bin/"))
    return copy


@needs_analyze
def test_the_service_is_hardened(stage: Stage) -> None:
    unit = stage.root / UNITS / "gpupoold.service"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(unit)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    [line] = [text for text in done.stdout.splitlines() if "Overall exposure level" in text]
    assert float(line.split(":")[1].split()[0]) <= MAX_EXPOSURE


def test_an_upgrade_leaves_the_configuration_alone_and_removal_everything_else(
    stage: Stage,
) -> None:
    config = stage.root / "etc/gpupool/gpupool.toml"
    config.write_text("[server]\nport = 9000\n")
    leftover = stage.root / LIB / "gpupool/lib/of-the-last-version.py"
    leftover.touch()
    before = files_under(stage.root)
    done = stage.make("install")
    assert done.returncode == 0, done.stderr
    assert "stays as it is" in done.stdout
    assert config.read_text() == "[server]\nport = 9000\n"
    assert before - files_under(stage.root) == {str(leftover.relative_to(stage.root))}

    assert stage.make("uninstall").returncode == 0
    shutil.rmtree(stage.root / "verify", ignore_errors=True)
    kept = {"usr/local/bin/other", "etc/other.conf", f"{UNITS}/other.service"}
    assert files_under(stage.root) == kept | {"etc/gpupool/gpupool.toml"}

    example = stage.root / "usr/local/share/doc/gpupool/gpupool.toml"
    example.parent.mkdir()
    shutil.copy(config, example)
    assert stage.make("uninstall").returncode == 0
    assert files_under(stage.root) == kept  # nobody had changed what was installed


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"VENV": "/nowhere"}, "run `make venv` first"),
        ({"PREFIX": "relative"}, "relative is not an absolute path"),
    ],
)
def test_what_cannot_be_installed(stage: Stage, variables: dict[str, str], why: str) -> None:
    done = stage.make("install", **variables)
    assert done.returncode != 0
    assert why in done.stderr
