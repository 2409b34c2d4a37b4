"""API keys: which keys there are, their use and their rates.

May import ``requests`` (refusals are recorded as events) and ``frontends``.
"""
