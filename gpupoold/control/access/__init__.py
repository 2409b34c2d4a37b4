"""API keys: rights, use and rates.

May import ``requests`` (refusals are recorded as events) and ``frontends``.
"""
