"""The version check, without importing vLLM."""

from __future__ import annotations

import importlib.metadata

import pytest

from gpupoold.engine_versions import CHECKED_VERSIONS, check_engine_version
from gpupoold.errors import Failed


@pytest.mark.parametrize("suffix", ["", "+cpu", "+cu130"])
@pytest.mark.parametrize("version", CHECKED_VERSIONS)
def test_checked_version(monkeypatch: pytest.MonkeyPatch, version: str, suffix: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version + suffix)
    assert check_engine_version() == version + suffix


@pytest.mark.parametrize("version", ["0.33.1", "0.31.0", "0.32.0rc1", "0.320.0", "1.0"])
def test_other_version_is_named(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(Failed, match=r"is installed.*0\.32\.0") as error:
        check_engine_version()
    assert version in str(error.value)


def test_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(Failed, match="not installed"):
        check_engine_version()


def test_installed_version_is_checked() -> None:
    assert check_engine_version().partition("+")[0] in CHECKED_VERSIONS
