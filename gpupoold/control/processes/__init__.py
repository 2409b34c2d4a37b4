"""Supervision of child processes: start, fork, restart, watchdog, crash attribution.

Owns no request and no model; imported by ``workers`` and ``frontends``.
"""
