"""Live requests between frontends and workers: dispatch, admission, migration, retries.

Owns the scheduling core's shell. Imports ``access``, ``accounting``, ``workers`` and ``fleet``; no
model's life cycle.
"""
