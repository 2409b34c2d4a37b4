"""Latency models of steps; imports the standard library and ``domain`` only."""
