"""TLS files: what is wrong with them is said before they are used."""

from __future__ import annotations

import contextlib
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from gpupoold.access.tls import Tls, check_files
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


def served_by(tls: Tls) -> bytes:
    """The certificate that a client gets of a server with these files."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname, client_context.verify_mode = False, ssl.CERT_NONE
    client = client_context.wrap_bio(incoming, outgoing)
    server = tls.context().wrap_bio(outgoing, incoming, server_side=True)
    for side in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    found = client.getpeercert(binary_form=True)
    assert found is not None
    return found


def pem(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def test_renewed_files_are_taken_when_they_fit_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = Tls(certificate, key)
    first = pem(certificate)
    assert served_by(tls) == first
    context = tls.context()
    (tmp_path / "new").mkdir()
    new_certificate, new_key = make_certificate(tmp_path / "new")
    new_certificate.replace(certificate)
    tls.renew()
    assert served_by(tls) == first
    assert "is not renewed" in caplog.text
    caplog.clear()
    tls.renew()
    assert caplog.text == ""  # said once
    new_key.replace(key)
    tls.renew()
    assert served_by(tls) == pem(certificate) != first
    assert tls.context() is context
    key.unlink()
    tls.renew()
    assert served_by(tls) == pem(certificate)


def test_server_without_files(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Tls(tmp_path / "none.crt", tmp_path / "none.key").context()
