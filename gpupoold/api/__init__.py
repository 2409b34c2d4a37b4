"""The admin API as its clients see it: bodies, paths, errors, the client.

Shared by the daemon, the command line and the terminal UI. Imports no control plane.
"""
