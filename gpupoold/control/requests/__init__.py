"""Live requests between frontends and workers: dispatch, admission, migration, retries.

Owns the scheduling core's shell. Imports ``workers`` and ``accounting``; no model's life cycle.
"""
