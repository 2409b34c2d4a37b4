"""``make install`` into a staging folder: what is there, what stays, what systemd says of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import ROOT

LIB = "usr/local/lib"
UNITS = f"{LIB}/systemd/system"
UNIT_NAMES = (
    "gpupoold.service",
    "gpupoold.socket",
    "gpupoold-admin.socket",
    "gpupoold-nvidia.service",
    "gpupool-fleet.service",
)
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

    def __init__(self, folder: Path, *, umask: int = 0o022, python: str = sys.executable) -> None:
        self.root = folder / "root"
        self.venv = folder / "venv"
        command = [python, "-m", "venv", "--without-pip", str(self.venv)]
        subprocess.run(command, check=True, umask=umask)
        [self.packages] = self.venv.glob("lib/python3*/site-packages")
        (self.packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def make(
        self, target: str, variables: Mapping[str, str] | None = None, umask: int = 0o022
    ) -> subprocess.CompletedProcess[str]:
        given = {"DESTDIR": str(self.root), "VENV": str(self.venv)} | dict(variables or {})
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            ["make", "-C", str(ROOT), target, *(f"{name}={given[name]}" for name in given)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            umask=umask,
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
    for name in UNIT_NAMES:
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
        "usr/local/share/man/man1/gpupool-add-model.1",
        "usr/local/share/man/man8/gpupoold.8",
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


@pytest.mark.slow
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
    done = stage.make("install", variables)
    assert done.returncode != 0
    assert why in done.stderr


def test_a_disk_without_room_for_the_copy(stage: Stage, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "df").write_text("#!/bin/sh\necho Avail; echo 4\n")
    (tools / "df").chmod(0o755)
    done = stage.make("install", {"PATH": f"{tools}:{os.environ['PATH']}"})
    assert done.returncode != 0
    assert "has 0 MB free" in done.stderr


BUILDER = 12345
SYSTEM_PYTHON = "/usr/bin/python3"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who installs for others")


def system_python() -> str:
    """One that the service can run; compiled packages of the tests' own environment fit it."""
    probe = "import sys, venv; print(*sys.version_info[:2])"
    command = [SYSTEM_PYTHON, "-c", probe]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"needs {SYSTEM_PYTHON} with its venv module")
    if found.split() != [str(number) for number in sys.version_info[:2]]:
        pytest.skip(f"needs {SYSTEM_PYTHON} of this Python's version")
    return SYSTEM_PYTHON


def give_to_builder(stage: Stage, umask: int) -> None:
    """What `make venv` leaves when another user has run it, and more than it should."""
    for path in (stage.venv, *stage.venv.rglob("*")):
        os.chown(path, BUILDER, BUILDER, follow_symlinks=False)
        if not path.is_symlink():
            path.chmod((0o777 if path.is_dir() or os.access(path, os.X_OK) else 0o666) & ~umask)


def builders_package(stage: Stage, umask: int) -> None:
    """A package with modes and links as they are found in the wild."""
    package = stage.packages / "sample"
    package.mkdir()
    (package / "__init__.py").write_text("ANSWER = 42\n")
    (package / "link.py").symlink_to("__init__.py")
    os.link(package / "__init__.py", package / "twin.py")
    give_to_builder(stage, umask)
    package.chmod(0o2777)
    (package / "__init__.py").chmod(0o4666)


@needs_root
@pytest.mark.parametrize("umask", [pytest.param(0o002, marks=pytest.mark.slow), 0o077])
@pytest.mark.slow
def test_nothing_installed_belongs_to_its_builder(tmp_path: Path, umask: int) -> None:
    stage = Stage(tmp_path, umask=umask)
    builders_package(stage, umask)
    done = stage.make("install", umask=umask)
    assert done.returncode == 0, done.stderr
    installed = [stage.root, *stage.root.rglob("*")]
    assert any(path.name == "twin.py" for path in installed)
    for path in installed:
        status = path.lstat()
        assert (status.st_uid, status.st_gid) == (0, 0), path
        if path.is_symlink():
            continue
        assert status.st_mode & 0o7022 == 0, f"{path} has mode {status.st_mode:o}"
        wanted = 0o555 if path.is_dir() else 0o444
        assert status.st_mode & wanted == wanted, f"{path} has mode {status.st_mode:o}"
    programs = stage.root / LIB / "gpupool/bin"
    texts = [path.read_bytes() for path in programs.iterdir() if not path.is_symlink()]
    assert not [text for text in texts if bytes(stage.venv) in text]


@needs_root
@pytest.mark.slow
def test_root_runs_nothing_out_of_the_builders_folders(tmp_path: Path) -> None:
    stage = Stage(tmp_path, python=system_python())
    named, mapped, linked = (tmp_path / name for name in ("named", "mapped", "linked"))
    for folder in (named, mapped, linked):
        folder.mkdir()
        os.chown(folder, BUILDER, BUILDER)
    (stage.packages / "named.pth").write_text(f"{named}\n")
    finder = f"MAPPING = {{'sample': {str(mapped)!r}}}\n"
    (stage.packages / "__editable___sample_finder.py").write_text(finder)
    (stage.packages / "sample.pth").write_text("import __editable___sample_finder\n")
    (stage.packages / "linked").symlink_to(linked)
    why = f"takes code from where others than root can change it: {linked} {mapped} {named}"

    assert f"warning: {stage.venv} {why}" in stage.make("install").stdout
    folders = {"PREFIX": str(stage.root / "opt"), "SYSCONFDIR": str(stage.root / "etc")}
    done = stage.make("install", {"DESTDIR": "", **folders})
    assert done.returncode != 0
    assert why in done.stderr
    assert not files_under(stage.root / "opt")


@needs_root
def test_others_cannot_replace_what_root_runs(tmp_path: Path) -> None:
    stage, theirs = Stage(tmp_path, python=system_python()), tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, BUILDER, BUILDER)
    done = stage.make(
        "install", {"DESTDIR": "", "PREFIX": str(theirs / "usr"), "SYSCONFDIR": str(theirs / "etc")}
    )
    assert done.returncode != 0
    assert f"{theirs}/usr can be changed by others than root" in done.stderr
    assert not list(theirs.iterdir())
