"""Grammars of requests: bounds, messages to the checker, verdicts.

Imports no engine.
"""
