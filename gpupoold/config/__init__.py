"""The configuration file: sections, values, checks, differences between two readings.

Imports ``api`` (bodies that show a configuration), ``access`` and ``latency`` (names of GPUs).
"""
