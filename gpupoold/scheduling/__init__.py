"""The scheduling core: events in, actions out, with the time as an argument.

Pure: imports the standard library, ``domain`` and ``latency`` only.
"""
