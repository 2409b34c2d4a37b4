"""The version check and the arguments, without importing vLLM."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from gpupoold.errors import Failed
from gpupoold.frontend import environment
from gpupoold.frontend.__main__ import parse_arguments
from gpupoold.frontend.server import FrontendSettings


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.0+cu130"])
def test_version_written_for(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    environment.check_engine_version()


def test_other_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.1")
    with pytest.raises(Failed, match=r"0\.33\.1 is installed.*0\.32\.0"):
        environment.check_engine_version()


def test_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(Failed, match="not installed"):
        environment.check_engine_version()


def test_arguments() -> None:
    given = ["--wire-fd", "3", "--listen-fd", "4", "--log-level", "debug", "--max-body-bytes", "9"]
    given += ["--max-live-requests", "7", "--max-bytes-in-flight", "90"]
    assert parse_arguments(given) == FrontendSettings(
        wire_fd=3,
        listen_fd=4,
        log_level="debug",
        max_body_bytes=9,
        max_live_requests=7,
        max_bytes_in_flight=90,
    )


def test_only_the_adapter_imports_the_engine() -> None:
    script = "import gpupoold.frontend.__main__, sys; "
    script += "assert not {'vllm', 'torch'} & set(sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", script], cwd=root).returncode == 0
