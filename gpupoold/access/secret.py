"""API keys as text: creation, parsing, hashing, comparison. Standard library only.

A key is ``gpk_<id>_<secret>``. The id is public: lists, logs and the history name a key by its id,
and the id finds the hash without a search.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Iterable, Iterator
from typing import NamedTuple

PREFIX = "gpk_"
HEADERS = frozenset({b"authorization", b"x-api-key"})
_BEARER = b"bearer "
# Letters, digits and _: a double click selects the whole key.
_ALPHABET = string.ascii_letters + string.digits
_ID_CHARS = 8
_SECRET_CHARS = 24  # of 62 letters: 142 bits
_FORM = re.compile(rf"{PREFIX}([A-Za-z0-9]{{{_ID_CHARS}}})_[A-Za-z0-9]{{{_SECRET_CHARS}}}")


class NewSecret(NamedTuple):
    """A new key: the id, the text for the owner, and the digest to store."""

    id: str
    text: str
    digest: str


def make_key(key_id: str | None = None) -> NewSecret:
    """Return a new key; with ``key_id`` a new secret for an existing key."""
    key_id = _letters(_ID_CHARS) if key_id is None else key_id
    text = f"{PREFIX}{key_id}_{_letters(_SECRET_CHARS)}"
    return NewSecret(key_id, text, digest_of(text))


def id_of(text: str) -> str | None:
    """Return the public id in a key's text, None if the text has not the form of a key."""
    match = _FORM.fullmatch(text)
    return None if match is None else match[1]


def sent_in(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[str]:
    """Yield the texts that a request sends as keys; names of headers are in lower case."""
    for name, value in headers:
        if name == b"x-api-key":
            yield value.decode("latin-1").strip()
        elif name == b"authorization" and value[: len(_BEARER)].lower() == _BEARER:
            yield value[len(_BEARER) :].decode("latin-1").strip()


def digest_of(text: str) -> str:
    """Return the digest to store for a key.

    One round of SHA-256 suffices: a slow hash protects texts chosen by people, and a key has 142
    random bits.
    """
    return hashlib.sha256(text.encode()).hexdigest()


def matches(text: str, digest: str) -> bool:
    """Return whether a key has this digest, in constant time."""
    return hmac.compare_digest(digest_of(text), digest)


def _letters(count: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(count))
