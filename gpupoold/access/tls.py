"""The certificate and key of the HTTP server: checks before use, and renewal."""

from __future__ import annotations

import logging
import ssl
import stat
from datetime import UTC, datetime
from pathlib import Path

from gpupoold.errors import ConfigError, SettingError

_logger = logging.getLogger(__name__)

# Modification time, size and inode of a file; a renewed file differs in at least one value.
_Stamp = tuple[tuple[int, int, int], ...]


class Tls:
    """A server's certificate and key files, and the SSL context made from the files."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = certificate, key
        self._context: ssl.SSLContext | None = None
        self._stamp: _Stamp | None = None

    def context(self) -> ssl.SSLContext:
        """Return the context for new connections, always the same object.

        Raises OSError: the files cannot be used; :func:`check_files` gives the reason.
        """
        if self._context is None:
            self._stamp = self._look()
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(*self._files, no_password)
        return self._context

    def renew(self) -> None:
        """Read the files again if they have changed; to be called from time to time.

        Open connections keep their certificate. If the files cannot be used, the error is logged
        and the old certificate stays: renewal tools write the two files one after the other.
        """
        stamp = self._look()
        if self._context is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            expires_at = check_files(*self._files)
            self._context.load_cert_chain(*self._files, no_password)
        except (ConfigError, OSError) as error:
            _logger.warning("the certificate is not renewed: %s", error)
            return
        _logger.info("the certificate was renewed; valid until %s", expires_at.date())

    def _look(self) -> _Stamp | None:
        try:
            found = [path.stat() for path in self._files]
        except OSError:
            return None
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in found)


def check_files(certificate: Path, key: Path) -> datetime:
    """Check that a server can use these PEM files; return the time when the certificate expires.

    Raises SettingError: a file cannot be read, the files do not match, the certificate is not valid
    now, or other users may read the key.
    """
    _check_readable(key, "server.tls_key")
    if key.stat().st_mode & stat.S_IROTH:
        raise SettingError(
            "server.tls_key", f"everyone can read {key}", f"restrict the file: chmod o= {key}"
        )
    _check_readable(certificate, "server.tls_cert")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, no_password)
    except ssl.SSLError as error:
        raise SettingError(*_explained(error, certificate, key)) from error
    except _HasPassword:
        raise SettingError(
            "server.tls_key",
            f"{key} is encrypted, and the daemon has no password",
            f"decrypt the file: openssl pkey -in {key} -out NEW, and keep NEW secret",
        ) from None
    return _check_dates(certificate)


def _check_readable(path: Path, name: str) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise SettingError(
            name,
            f"{path} cannot be read: {error.strerror}",
            "name a PEM file readable by gpupoold's user",
        ) from error


class _HasPassword(Exception):
    """The key is encrypted."""


def no_password() -> str:
    """Raise an error in place of OpenSSL's question on the terminal."""
    raise _HasPassword


def _explained(error: ssl.SSLError, certificate: Path, key: Path) -> tuple[str, str, str]:
    if error.reason == "KEY_VALUES_MISMATCH":
        return (
            "server.tls_key",
            f"{key} is not the key of the certificate {certificate}",
            "name the two files of one pair",
        )
    return (
        "server.tls_cert",
        f"{certificate} and {key} are no certificate and key in PEM form: {error.reason or error}",
        "the server's certificate comes first in the file, then the certificates of its issuers",
    )


def _check_dates(certificate: Path) -> datetime:
    # Imported here, because the module takes megabytes of memory that a daemon without TLS saves.
    from cryptography import x509

    first = x509.load_pem_x509_certificates(certificate.read_bytes())[0]
    now = datetime.now(UTC)
    if not first.not_valid_before_utc <= now <= first.not_valid_after_utc:
        raise SettingError(
            "server.tls_cert",
            f"{certificate} is valid from {first.not_valid_before_utc:%Y-%m-%d}"
            f" to {first.not_valid_after_utc:%Y-%m-%d}, not now",
            "renew the certificate, or set this machine's clock",
        )
    return first.not_valid_after_utc
