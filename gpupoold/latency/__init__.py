"""Latency models of prefill and decode steps: shapes, fits, hardware, stored profiles.

Pure: imports the standard library and ``domain`` only.
"""
