"""Processes, sockets, and systemd: the operating system's side of the daemon.

Owns no model, request or device.
"""
