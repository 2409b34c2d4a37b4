"""Reachability of a listening socket from other machines, and the need for API keys."""

from __future__ import annotations

import ipaddress
import socket

from gpupoold.config.access import AccessSettings


def is_local(listener: socket.socket) -> bool:
    """Return whether only processes of this machine can connect, by the socket's address.

    True for a unix socket: the permissions of the socket's file restrict access.
    """
    if listener.family == socket.AF_UNIX:
        return True
    host = listener.getsockname()[0].partition("%")[0]
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an address or name to listen at."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def why_not_listen(host: str) -> str:
    """Return why no socket of this machine can listen at ``host``, empty if one can.

    A free port is tried, so another program may use the configured one.
    """
    try:
        with socket.socket(family_of(host), socket.SOCK_STREAM) as listener:
            listener.bind((host, 0))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def why_keys_are_required(access: AccessSettings, listener: socket.socket) -> str:
    """Return why every request at this socket needs an API key; empty if no key is needed."""
    if not is_local(listener):
        host, port = listener.getsockname()[:2]
        return f"the API listens at {host} port {port}, beyond this machine, and needs API keys"
    if access.require_keys == "always":
        return 'the API needs keys (access.require_keys = "always")'
    return ""
