"""Signatures of requests of a fleet's entrance.

All daemons of a fleet and the entrance share a secret. A signature covers method, path, time and
the digest of the body, and is valid for a minute; the secret itself is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from typing import NamedTuple

HEADER = "x-gpupool-fleet"
MAX_SKEW_S = 60.0
_SECRET = re.compile(r"[0-9a-f]{64}")
_VALUE = re.compile(r"t=([0-9]{1,16}),d=([0-9a-f]{64}),s=([0-9a-f]{64})")


class Signature(NamedTuple):
    """The parts of a signature's text: milliseconds since 1970, and two digests in hex."""

    time_ms: int
    body_digest: str
    digest: str

    def covers(self, body: bytes) -> bool:
        return hmac.compare_digest(self.body_digest, hashlib.sha256(body).hexdigest())


def make_secret() -> str:
    """Return a new secret: 256 random bits in hex."""
    return secrets.token_hex(32)


def is_secret(text: str) -> bool:
    return _SECRET.fullmatch(text) is not None


def sign(secret: str, method: str, path: str, body: bytes, now_s: float | None = None) -> str:
    time_ms = int(1e3 * (time.time() if now_s is None else now_s))
    body_digest = hashlib.sha256(body).hexdigest()
    digest = _digest(secret, method, path, time_ms, body_digest)
    return f"t={time_ms},d={body_digest},s={digest}"


def verified(
    secret: str, method: str, path: str, value: str, now_s: float | None = None
) -> Signature | None:
    """Return the signature if made with the secret, for this path, within the last minute.

    The caller must compare the body too. None for an empty secret.
    """
    match = _VALUE.fullmatch(value)
    if match is None or not secret:
        return None
    signature = Signature(int(match[1]), match[2], match[3])
    expected = _digest(secret, method, path, signature.time_ms, signature.body_digest)
    skew_s = abs((time.time() if now_s is None else now_s) - signature.time_ms / 1e3)
    is_valid = hmac.compare_digest(expected, signature.digest) and skew_s <= MAX_SKEW_S
    return signature if is_valid else None


def _digest(secret: str, method: str, path: str, time_ms: int, body_digest: str) -> str:
    text = f"{method}\n{path}\n{time_ms}\n{body_digest}"
    return hmac.new(bytes.fromhex(secret), text.encode(), hashlib.sha256).hexdigest()
