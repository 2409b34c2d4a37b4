"""Supervision of child processes: start, fork, watchdog, crash attribution, backoff.

Owns no request and no model; imported by ``workers`` and ``frontends``.
"""
