"""Counts of requests, tokens, turns and minutes.

Imports the record of a live request; no dispatcher, model or process.
"""
