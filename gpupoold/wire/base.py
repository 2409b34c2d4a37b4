"""What all messages are."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, tag=True):
    """Base of all messages; the struct's name is its tag on the wire."""
