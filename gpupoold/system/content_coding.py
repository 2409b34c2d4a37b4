"""Codings of request bodies; the servers decode none."""

from __future__ import annotations

from collections.abc import Iterable

_MAX_CHARS = 40


def unread_coding(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the content coding of a request's body, None for a body as it is."""
    for name, value in headers:
        if name == b"content-encoding":
            for coding in value.decode("latin-1").split(","):
                if (found := coding.strip().lower()) not in ("", "identity"):
                    return found[:_MAX_CHARS]
    return None
