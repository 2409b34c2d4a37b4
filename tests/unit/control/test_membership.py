"""Tests of ``control/access.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpupoold.access import fleet
from gpupoold.control import access
from gpupoold.errors import Failed


def test_the_file(tmp_path: Path) -> None:
    assert access.read_secret(tmp_path) == ""
    secret = fleet.make_secret()
    assert fleet.is_secret(secret)
    access.write_secret(tmp_path, secret)
    assert access.read_secret(tmp_path) == secret
    assert (tmp_path / access.SECRET_FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / access.SECRET_FILE).write_text("short")
    with pytest.raises(Failed, match="not the secret"):
        access.read_secret(tmp_path)
    access.write_secret(tmp_path, "")
    access.write_secret(tmp_path, "")
    assert access.read_secret(tmp_path) == ""
    with pytest.raises(Failed, match="cannot be written"):
        access.write_secret(tmp_path / "nowhere", secret)
