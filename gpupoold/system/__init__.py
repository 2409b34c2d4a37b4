"""Processes, sockets, systemd and durable files: the operating system's side of the daemon.

Owns no model, request or device.
"""
