"""The base class of messages."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, tag=True):
    """Base of all messages; the class name is the tag on the wire."""
