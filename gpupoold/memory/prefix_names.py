"""Names of KV that several engines and processes may share: the owners of a store's blocks.

A name consists of two digests in hexadecimal digits, of the model's name and of all else that
decides on the KV. So the names of one model begin alike, and nobody has to remember the names of
the engines that the model has had.
"""

from __future__ import annotations

from blake3 import blake3

from gpupoold.memory.prefix_table import OWNER_BYTES

# Digits of each digest.
NUM_DIGITS = OWNER_BYTES


def owners_of(model: str) -> str:
    """Return the beginning of the names of all KV of a model."""
    return _digest(model)


def owner_of(model: str, identity: str) -> str:
    """Return the name of a model's KV; ``identity`` has all else that decides on the KV."""
    return owners_of(model) + _digest(identity)


def _digest(text: str) -> str:
    return blake3(text.encode()).hexdigest(NUM_DIGITS // 2)
