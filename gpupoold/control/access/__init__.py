"""API keys: rights, use and rates.

Imports ``accounting`` (refusals are recorded as events); no request.
"""
