"""The admin API for clients: bodies, paths, errors, the client.

Shared by the daemon, the command line and the terminal UI. Imports no control plane.
"""
