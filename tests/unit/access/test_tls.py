"""TLS files: what is wrong with them is said before they are used."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from gpupoold.access.tls import check_files
from gpupoold.errors import ConfigError
from tests.certificates import make_certificate


def test_pair_that_can_be_used(tmp_path: Path) -> None:
    expires_at = check_files(*make_certificate(tmp_path, last_day=10))
    assert timedelta(days=9) < expires_at - datetime.now(UTC) < timedelta(days=11)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    for files, name in (
        ((certificate, tmp_path / "none.key"), "tls_key"),
        ((tmp_path / "none.crt", key), "tls_cert"),
        ((tmp_path, key), "tls_cert"),
    ):
        with pytest.raises(ConfigError, match=f"server.{name}: .* cannot be read"):
            check_files(*files)


def test_key_of_another_certificate(tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path, "one")
    _, key = make_certificate(tmp_path, "two")
    with pytest.raises(ConfigError, match=r"two\.key is not the key of the certificate"):
        check_files(certificate, key)


@pytest.mark.parametrize(("first_day", "last_day"), [(-9, -2), (2, 9)])
def test_certificate_that_is_not_valid_now(tmp_path: Path, first_day: int, last_day: int) -> None:
    files = make_certificate(tmp_path, first_day=first_day, last_day=last_day)
    with pytest.raises(ConfigError, match=r"is valid from .*, not now"):
        check_files(*files)


def test_key_that_everyone_can_read(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="everyone can read") as caught:
        check_files(certificate, key)
    assert f"chmod o= {key}" in caught.value.hint


def test_files_of_another_kind(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    certificate.write_text("no certificate")
    with pytest.raises(ConfigError, match="no certificate and key in PEM form"):
        check_files(certificate, key)


def test_encrypted_key_is_not_asked_for_on_the_terminal(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="is encrypted"):
        check_files(certificate, key)
