"""Errors in the inputs of a latency model; all are ``ValueError``."""

from __future__ import annotations


class LatencyError(ValueError):
    """Base of the package's errors; the message names the error, the place and a remedy."""


class ShapeError(LatencyError):
    """A checkpoint's configuration lacks a field or contradicts itself."""


class FitError(LatencyError):
    """The points do not determine the constants: too few, or all alike."""


class DataError(LatencyError):
    """Packaged or stored data lack an entry or a part."""
