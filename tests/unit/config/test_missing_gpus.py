"""GPUs that were expected and not found, and what the daemon does then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpupoold.config import schema
from gpupoold.config.file import missing_gpus, parsed_file
from gpupoold.engine_versions import is_built_for_gpus
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The driver is not loaded."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(schema, "NVIDIA_GPUS", tmp_path / "gpus")


def install(folder: Path, name: str, version: str = "0.32.0") -> Path:
    """As much of a package as its name and version are read from."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


@pytest.fixture
def built_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "site", "vllm"))


@pytest.mark.parametrize(
    ("version", "is_for_gpus"), [("0.32.0", True), ("0.32.0+cu130", True), ("0.32.0+cpu", False)]
)
def test_which_build(
    version: str, is_for_gpus: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "site", "vllm", version))
    assert is_built_for_gpus() is is_for_gpus


@pytest.mark.usefixtures("built_for_gpus")
class TestEngineForGpus:
    def test_a_driver_that_is_not_loaded(self) -> None:
        problem, fix = missing_gpus(parsed_file("", None))
        assert "no NVIDIA GPU was found" in problem
        assert "modprobe nvidia" in fix
        assert 'devices = ["cuda:0"]' in fix

    def test_a_variable_that_hides_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
        assert missing_gpus(parsed_file("", None)) == ("", "")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        problem, _ = missing_gpus(parsed_file("", None))
        assert "CUDA_VISIBLE_DEVICES is '-1'" in problem

    @pytest.mark.parametrize(
        "text", ['devices = ["emulated"]', 'devices = ["cuda:0"]', '[[device]]\nkind = "emulated"']
    )
    def test_devices_that_the_owner_chose(self, text: str) -> None:
        assert missing_gpus(parsed_file(text, None)) == ("", "")


def test_an_engine_for_cpus_has_an_emulated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpupoold.config.file.is_built_for_gpus", lambda: False)
    assert missing_gpus(parsed_file("", None)) == ("", "")


@pytest.mark.parametrize(
    ("devices", "version", "visible", "reason"),
    [
        ("", "0.32.0", {"CUDA_VISIBLE_DEVICES": ""}, "vLLM is built for GPUs"),
        # The worker would end at each start, and be restarted for ever.
        ('devices = ["cuda:0"]', "0.32.0+cpu", {}, "the installed vLLM is built for CPUs only"),
    ],
)
def test_the_daemon_refuses_to_start_and_systemd_tries_again(
    tmp_path: Path, devices: str, version: str, visible: dict[str, str], reason: str
) -> None:
    """Exit status 1; of 2 and 5 the unit says that another start is useless."""
    config = tmp_path / "gpupool.toml"
    folders = f'[paths]\nstate_dir = "{tmp_path}/state"\nruntime_dir = "{tmp_path}/run"\n'
    config.write_text(f"{devices}\n{folders}")
    packages = install(tmp_path / "site", "vllm", version)
    paths = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "gpupoold", "--config", str(config)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths} | visible,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert reason in done.stderr
    assert not (tmp_path / "state").exists()
    unit = (ROOT / "systemd" / "gpupoold.service").read_text()
    assert "RestartPreventExitStatus=2 5\n" in unit
    assert "Restart=on-failure\n" in unit
