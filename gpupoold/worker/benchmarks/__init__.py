"""Measurements of memory operations inside a worker, without the time of messages."""
