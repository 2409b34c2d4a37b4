"""The scheduling core; imports the standard library, ``domain`` and ``latency`` only."""
