"""Where keys are needed: by the address that a socket really has."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gpupoold.config.sections import AccessSettings
from gpupoold.system.listeners import is_local, why_keys_are_required

ALWAYS = AccessSettings(require_keys="always")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::1", True),
        ("::", False),
        ("::ffff:127.0.0.1", True),
        ("::ffff:0.0.0.0", False),
    ],
)
def test_addresses(host: str, expected: bool) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            pytest.skip(f"this machine has no {host}: {error.strerror}")
        assert is_local(listener) is expected
        reason = why_keys_are_required(AccessSettings(), listener)
        assert bool(reason) is not expected
        assert why_keys_are_required(ALWAYS, listener)
        if not expected:
            assert f"port {listener.getsockname()[1]}, beyond this machine" in reason


def test_unix_socket_is_local(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "http.sock"))
        assert is_local(listener)
        assert why_keys_are_required(AccessSettings(), listener) == ""
        assert "always" in why_keys_are_required(ALWAYS, listener)
