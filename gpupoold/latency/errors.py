"""What can be wrong with the inputs of a latency model; all are ``ValueError``."""

from __future__ import annotations


class LatencyError(ValueError):
    """Base of the package's errors; the message says what was wrong, where, and what to do."""


class ShapeError(LatencyError):
    """A checkpoint's configuration lacks a field or contradicts itself."""


class FitError(LatencyError):
    """The points do not determine the constants: too few, or all alike."""


class DataError(LatencyError):
    """Data, packaged or stored, has no such entry, or one that lacks a part."""
