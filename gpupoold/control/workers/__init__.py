"""The worker processes, one per device: start, readiness, roles, readings.

Imports ``processes`` and ``weights``; no request.
"""
