"""API keys as text: made, taken apart, hashed and compared. Standard library only.

A key is ``gpk_<id>_<secret>``. The id is public: it names the key in lists, logs and the
history, and finds its hash without a search. The rest is the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from typing import NamedTuple

PREFIX = "gpk_"
# With these and _ a double click selects the whole key.
_ALPHABET = string.ascii_letters + string.digits
_ID_CHARS = 8
_SECRET_CHARS = 24  # of 62 letters: 142 bits
_FORM = re.compile(rf"{PREFIX}([A-Za-z0-9]{{{_ID_CHARS}}})_[A-Za-z0-9]{{{_SECRET_CHARS}}}")


class NewSecret(NamedTuple):
    """A key that was just made: its id, the whole text for its owner, and what is stored."""

    id: str
    text: str
    digest: str


def make_key(key_id: str | None = None) -> NewSecret:
    """A new key; with ``key_id`` a new secret for the key that has this id."""
    key_id = _letters(_ID_CHARS) if key_id is None else key_id
    text = f"{PREFIX}{key_id}_{_letters(_SECRET_CHARS)}"
    return NewSecret(key_id, text, digest_of(text))


def id_of(text: str) -> str | None:
    """The public id in a key's text; None where it has not the form of a key."""
    match = _FORM.fullmatch(text)
    return None if match is None else match[1]


def digest_of(text: str) -> str:
    """What is stored in a key's place.

    SHA-256 once: slow hashes make guessing dear where people choose what is hashed. Nobody
    guesses one of 2^142 random texts, so they would only cost time on every request.
    """
    return hashlib.sha256(text.encode()).hexdigest()


def matches(text: str, digest: str) -> bool:
    """Return whether this is the key with that digest, in time that tells nothing about it."""
    return hmac.compare_digest(digest_of(text), digest)


def _letters(count: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(count))
