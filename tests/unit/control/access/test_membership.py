"""Tests of ``control/access/membership.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpupoold.access import fleet
from gpupoold.control.access import membership
from gpupoold.errors import Failed


def test_the_file(tmp_path: Path) -> None:
    assert membership.read_secret(tmp_path) == ""
    secret = fleet.make_secret()
    assert fleet.is_secret(secret)
    membership.write_secret(tmp_path, secret)
    assert membership.read_secret(tmp_path) == secret
    assert (tmp_path / membership.SECRET_FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / membership.SECRET_FILE).write_text("short")
    with pytest.raises(Failed, match="not the secret"):
        membership.read_secret(tmp_path)
    membership.write_secret(tmp_path, "")
    membership.write_secret(tmp_path, "")
    assert membership.read_secret(tmp_path) == ""
    with pytest.raises(Failed, match="cannot be written"):
        membership.write_secret(tmp_path / "nowhere", secret)
