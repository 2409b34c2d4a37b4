"""The frontend processes: start, configuration, end.

Imports ``processes`` only.
"""
