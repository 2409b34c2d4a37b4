"""The configuration file: sections, values, checks, differences between two readings.

Imports ``api`` (bodies with a configuration), ``access`` and ``latency`` (names of GPUs).
"""
